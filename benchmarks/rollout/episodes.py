"""The controller's side of `throughput.py`, and the environment whose episodes are leased."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

from slipstream.client import Environment, StepResult

from benchmarks.rollout.engines import WORDS, Turn, reply_tokens

# A prompt is "<s>", words and "<reply>".
SPECIAL_TOKENS = 2

Beside = Callable[[Coroutine[Any, Any, dict[str, Any]]], Coroutine[Any, Any, dict[str, Any]]]


class RandomWords(Environment[int]):
    """Prompts of random words, each task its own; any reply ends the episode."""

    def __init__(self, num_words: int) -> None:
        """`num_words` in every prompt."""
        self._num_words = num_words

    def tasks(self) -> range:
        return range(1_000_000)

    def reset(self, task: int) -> list[dict[str, str]]:
        words = random.Random(task).choices(WORDS, k=self._num_words)
        return [{"role": "user", "content": " ".join(words)}]

    def step(self, reply: str) -> StepResult:
        """Nothing is to be learnt here."""
        return StepResult(reward=0.0)


class Episodes:
    """Leases, and the trajectories that come back."""

    def __init__(
        self,
        fleet: Any,  # noqa: ANN401 - of the tests, which are no package
        beside: Beside,
        arguments: argparse.Namespace,
    ) -> None:
        """`fleet` serves already; `beside` runs work as long as the server lives."""
        self._fleet, self._beside = fleet, beside
        self._arguments = arguments
        self._connection: Any = None

    async def join(self) -> None:
        """Waits for the server, gives it a version and the environment."""
        from slipstream.v1 import environment_pb2, fleet_pb2

        self._connection = await self._fleet.joined(60.0)
        await self._connection.serve_version(1, digests=())
        words = self._arguments.prompt_tokens - SPECIAL_TOKENS
        spec = environment_pb2.EnvironmentSpec(
            name="words",
            reference="benchmarks.rollout.episodes:RandomWords",
            args_json=json.dumps({"num_words": words}),
            timeout_s=60,
            num_workers=self._arguments.workers,
        )
        self._connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        report = await self._connection.wait_for("environment")
        if not report.num_tasks:
            raise RuntimeError(report.failure.message)

    async def run(self, turn: Turn, limit_s: float) -> dict[str, Any]:
        """Runs `turn.requests` episodes: as many as the other rows send requests."""
        return await self._beside(self._run(turn, limit_s))

    async def _run(self, turn: Turn, limit_s: float) -> dict[str, Any]:
        fleet = self._fleet
        fleet.trajectories.clear()
        started_s = time.perf_counter()
        leased = 0
        while leased < turn.requests:
            # A controller does the same: one lease for every free place; each trajectory frees one.
            for number in range(leased, min(turn.slots + len(fleet.trajectories), turn.requests)):
                self._lease(turn, turn.first_seed + number)
                leased += 1
            if leased < turn.requests:
                await fleet.wait_trajectories(leased - turn.slots + 1, limit_s)
        trajectories = await fleet.wait_trajectories(turn.requests, limit_s)
        seconds = time.perf_counter() - started_s
        failed = {t.failure.message for t in trajectories if t.failure is not None}
        if failed:
            raise RuntimeError(f"episodes failed: {sorted(failed)[:2]}")
        return {"tokens": sum(t.num_sampled_tokens for t in trajectories), "seconds": seconds}

    def _lease(self, turn: Turn, seed: int) -> None:
        from slipstream.v1 import fleet_pb2

        num_tokens = reply_tokens(seed, turn)
        self._connection.lease(
            f"g{seed}",
            environment="words",
            task_index=seed,
            members=[0],
            sampling=fleet_pb2.SamplingSettings(
                temperature=1.0,
                top_p=1.0,
                max_reply_tokens=num_tokens,
                max_turns=1,
                max_episode_tokens=self._arguments.prompt_tokens + num_tokens,
                ignore_eos=True,
            ),
            timeout_s=60.0,
        )
