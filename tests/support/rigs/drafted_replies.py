"""Replies of a real engine that drafts, on a GPU: a program, since engines are forked.

`PYTHONPATH=tests python -m support.rigs.drafted_replies DIR`: the engine of the model in DIR/model
answers in several ways; DIR/replies.json has the tokens, log-probabilities, versions and counts.
"""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.engine_interface import Sampling

from support.fakes.small_configs import NGRAM, small_config
from support.rigs.started_engine import end_engine

PROMPT = [1, 4, 5, 6, 3]
TEMPERATURE = 0.15
LIMITS = (1, 2, 15, 16, 17, 40)
ENDLESS = Sampling(TEMPERATURE, 1.0, 0, 200, 1, 250, ignore_eos=True)
GREEDY = dataclasses.replace(ENDLESS, temperature=0.0)


def config_of(folder: Path) -> Config:
    """Settings with fewer blocks than 16 long replies need: some are preempted."""
    return small_config(
        model={"path": str(folder / "model"), "dtype": "bfloat16"},
        algorithm={"group_size": 4, "groups_per_step": 1},
        sampling={"max_reply_tokens": 200, "max_episode_tokens": 250},
        rollout_server={
            "max_episodes": 16,
            "gpu_memory_utilization": 0.05,
            "engine": {
                "num_gpu_blocks_override": 160,
                "cudagraph_capture_sizes": [16, 80],
                # vLLM plans ahead with it.
                "speculative_config": NGRAM | {"method": "ngram_gpu"},
            },
        },
    )


class Replies:
    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - needs vLLM to name it
        self._engine = engine
        self.found: dict[str, Any] = {}

    async def ask(
        self, name: str, sampling: Sampling, num_tokens: int, count: int = 16
    ) -> None:
        """Keeps the replies to some requests, and how many of their tokens were drafted."""
        before = self._engine.requests.use()
        replies = await asyncio.gather(
            *(
                self._engine.requests.generate(
                    f"{name}-{n}", PROMPT, sampling, num_tokens
                )
                for n in range(count)
            )
        )
        use = self._engine.requests.use()
        self.found[name] = {
            "drafted": use.drafted_tokens - before.drafted_tokens,
            "accepted": use.accepted_tokens - before.accepted_tokens,
            "replies": [
                {
                    "tokens": reply.token_ids.tolist(),
                    "logprobs": reply.logprobs.tolist(),
                    "spans": [
                        (span.version.step, span.length) for span in reply.version_spans
                    ],
                    "finish": reply.finish_reason.name,
                }
                for reply in replies
            ],
        }

    async def ask_and_pause(self, name: str) -> None:
        """Pauses twice while the engine replies; the weights stay, their version does not."""
        start = self._engine.requests.use().generated_tokens
        asking = asyncio.create_task(self.ask(name, ENDLESS, 200))
        for step in (1, 2):
            until = start + 600 * step
            while (
                self._engine.requests.use().generated_tokens < until
                and not asking.done()
            ):
                await asyncio.sleep(0.001)
            await self._engine.pauses.pause()
            await self._engine.pauses.resume(PolicyVersion(0, step))
        await asking


async def answer(folder: Path) -> dict[str, Any]:
    config = config_of(folder)
    os.environ |= child_processes.engine_environment(config, on_cpu=False)
    from slipstream.rollout_server.vllm.engine import VllmEngine

    engine = await VllmEngine.start(config, seed=1)
    try:
        await engine.pauses.resume(PolicyVersion(0, 0))
        replies = Replies(engine)
        for turn in ("cold", "warm"):
            await replies.ask(turn, ENDLESS, 150)
        for limit in LIMITS:
            await replies.ask(f"limit {limit}", GREEDY, limit)
        await replies.ask_and_pause("paused")
        return replies.found
    finally:
        await end_engine(engine)


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    (chosen / "replies.json").write_text(json.dumps(asyncio.run(answer(chosen))))
