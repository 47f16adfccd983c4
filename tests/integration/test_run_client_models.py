"""Two clients' models in a whole run that is killed twice come out as each does alone."""

import asyncio
from pathlib import Path

import pytest
from support.fakes.field_models import make_delta_net_model
from support.rigs.loop_client import LoopClient, logprobs_of
from support.rigs.run_processes import (
    CONTROLLER,
    SLOW_RUN,
    TRAINER,
    check_replay,
    checked,
    kill,
    succeed,
)
from support.rigs.tinker_runs import newest_reply, taught, tinker
from support.rigs.waiting import until

pytestmark = [*SLOW_RUN, pytest.mark.timeout(900)]
# rank and the reply that is taught, by client
CLIENTS = {"one": (1, [9, 12, 10, 14, 11, 13]), "two": (8, [14, 9, 13, 12, 10, 11])}
SETTINGS = ("checkpoint.every_steps=4", "lora.rank=8")
PHASES = 3
STEPS = 4


class Seen:
    """A client and what it has seen."""

    def __init__(self, name: str, client: LoopClient) -> None:
        self.client, (self.rank, reply) = client, CLIENTS[name]
        self._datum = taught(reply)
        self.logprobs: list[list[float]] = []
        self.sampled: list[list[int]] = []

    async def begin(self) -> None:
        assert "model_id" in await self.client.begin(rank=self.rank)

    async def train(self) -> None:
        for _ in range(STEPS):
            passed = await self.client.send(
                self.client.passed([self._datum], "cross_entropy")
            )
            assert "error" not in await self.client.step(learning_rate=0.03)
            self.logprobs += logprobs_of(await self.client.result(passed))

    async def sample(self) -> None:
        self.sampled.append(await newest_reply(self.client))

    async def finish(self) -> None:
        await self.client.post(f"sessions/{self.client.session}/finish", {"reason": {}})


@pytest.mark.parametrize("has_delta_nets", [False, True])
async def test_two_models_that_are_killed_twice_are_those_of_runs_alone(
    tmp_path: Path, tiny_model: Path, has_delta_nets: bool
) -> None:
    model = make_delta_net_model(tmp_path) if has_delta_nets else tiny_model
    # On a CPU vLLM computes delta nets in no other type.
    dtype = f"model.dtype={'bfloat16' if has_delta_nets else 'float32'}"
    settings = (*SETTINGS, dtype)
    places = 'lora.adapters=["a","b","unused"]'
    async with tinker(tmp_path / "both", model, *settings, places) as (client, run):
        both = [Seen(name, client.another()) for name in CLIENTS]
        await asyncio.gather(*(looper.begin() for looper in both))
        for phase in range(PHASES):
            training = [asyncio.ensure_future(looper.train()) for looper in both]
            if phase:
                least_steps = phase * STEPS
                await until(
                    lambda most=least_steps: any(
                        len(looper.logprobs) > most for looper in both
                    )
                )
                (process,) = run.find(CONTROLLER if phase == 2 else f"{TRAINER} ")
                kill(process)
            await asyncio.gather(*training)
            await asyncio.gather(*(looper.sample() for looper in both))
        for looper in both:
            await looper.finish()
    summary = checked(tmp_path / "both" / "own")
    assert summary["steps"] == 2 * (1 + PHASES * (STEPS + 1))
    check_replay(tmp_path / "both" / "own", cwd=tmp_path)
    export = succeed("export", tmp_path / "both" / "own", cwd=tmp_path, limit_s=200)
    assert (
        "left out: unused: this checkpoint has no rank" in export.stdout + export.stderr
    )
    places = 'lora.adapters=["a"]'
    async with tinker(tmp_path / "alone", model, *settings, places) as (client, _):
        for name, seen in zip(CLIENTS, both, strict=True):
            alone = Seen(name, client.another())
            await alone.begin()
            for _ in range(PHASES):
                await alone.train()
                await alone.sample()
            await alone.finish()
            assert seen.logprobs == alone.logprobs
            assert seen.sampled == alone.sampled
    for seen in both:
        assert sum(seen.logprobs[-1]) > sum(seen.logprobs[0]) + 1.0
    assert both[0].sampled[-1] != both[1].sampled[-1]
