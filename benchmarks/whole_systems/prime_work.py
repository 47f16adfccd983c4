"""The work of whole systems as a taskset of prime-rl's verifiers, with a harness of its own.

The harness makes one request from the environment's process. verifiers' `null` harness starts a
program for each episode through `uv`, which fetches packages.
"""

# ruff: noqa: ANN401, D102 - verifiers tells no types; names of methods are its own.

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

from benchmarks.whole_systems.work import TASKS, Work, reward

__all__ = ["OneCall", "WorkTaskset"]
TIMEOUT_S = 1800.0


class WorkTask(vf.Task[vf.TaskData]):
    """One prompt; the reward is about that of a coin."""

    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.reward(weight=1.0)
    async def coin(self, trace: vf.Trace) -> float:
        return reward(trace.last_reply or "")


class WorkTaskset(vf.Taskset[WorkTask, vf.TasksetConfig]):
    """All prompts of the work."""

    def load(self) -> list[WorkTask]:
        work = Work.of_environ()
        prompts = (work.prompt(task)[0]["content"] for task in range(TASKS))
        return [
            WorkTask(vf.TaskData(idx=place, prompt=prompt), self.config.task)
            for place, prompt in enumerate(prompts)
        ]


class OneCall(vf.Harness[HarnessConfig]):
    """Asks the model once, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _client: httpx.AsyncClient | None = None

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        if OneCall._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            OneCall._client = httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits)
        answer = await OneCall._client.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
            headers={"Authorization": f"Bearer {secret}"},
        )
        return ProgramResult(0 if answer.is_success else 1, "", answer.text[-2000:])
