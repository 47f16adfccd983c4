"""Two clients' models in a whole run that is killed twice come out as each does alone."""

import asyncio
import contextlib
import signal

import httpx
import pytest
from slipstream.client.launch.preflight import free_port
from support.rigs.loop_client import LoopClient, logprobs_of, replies
from support.rigs.run_processes import (
    CONTROLLER,
    SLOW_RUN,
    TRAINER,
    check_ledger,
    command,
    kill,
    succeed,
    summary_of,
)
from support.rigs.smallest_run import own_settings
from support.rigs.waiting import LIMIT_S, until

pytestmark = [*SLOW_RUN, pytest.mark.timeout(900)]
PROMPT = [1, 5, 6, 7]
GREEDY = {"sampling_params": {"max_tokens": 6, "temperature": 0.0}}
# rank and the reply that is taught, by client
CLIENTS = {"one": (1, [9, 12, 10, 14, 11, 13]), "two": (8, [14, 9, 13, 12, 10, 11])}
CONFIG = """
[run]
name = "own"
steps = 1000
[model]
dtype = "float32"
[sampling]
max_reply_tokens = 8
max_episode_tokens = 64
[checkpoint]
every_steps = 4
[lora]
rank = 8
"""
PHASES, STEPS = 3, 4


@contextlib.asynccontextmanager
async def tinker(folder, model, places: str):
    """The port of a run that `slipstream tinker` has started, and its processes."""
    folder.mkdir()
    port, config = free_port("127.0.0.1"), folder / "own.toml"
    config.write_text(CONFIG)
    given = (config, "--port", port, *own_settings(folder, model), f"lora.adapters={places}")
    async with command(folder, "tinker", *given, cwd=folder) as run:
        async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(trust_env=False) as http:
            while True:
                assert run.process.returncode is None, run.out + run.err
                with contextlib.suppress(httpx.TransportError):
                    await http.get(f"http://127.0.0.1:{port}/api/v1/healthz")
                    break
                await asyncio.sleep(0.1)
        yield port, run
        run.process.send_signal(signal.SIGINT)
        assert await run.wait(LIMIT_S) == 128 + signal.SIGINT, run.out + run.err


class Seen:
    """A client and what it has seen."""

    def __init__(self, name: str, port: int, model) -> None:
        self.rank, reply = CLIENTS[name]
        self.client = LoopClient(port, base_model=str(model))
        tokens = [*PROMPT, *reply]
        weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(reply)
        self._datum = (tokens[:-1], tokens[1:], {"weights": weights})
        self.logprobs: list[list[float]] = []
        self.sampled: list[list[int]] = []

    async def begin(self) -> None:
        assert "model_id" in await self.client.begin(rank=self.rank)

    async def train(self) -> None:
        for _ in range(STEPS):
            passed = await self.client.send(self.client.passed([self._datum], "cross_entropy"))
            assert "error" not in await self.client.step(learning_rate=0.03)
            self.logprobs += logprobs_of(await self.client.result(passed))

    async def sample(self) -> None:
        session = await self.client.publish()
        future = await self.client.ask(session, PROMPT, **GREEDY)
        ((tokens, _, _),) = replies(await self.client.result(future))
        self.sampled.append(tokens)

    async def close(self) -> None:
        await self.client.post(f"sessions/{self.client.session}/finish", {"reason": {}})
        await self.client.http.aclose()


async def test_two_models_that_are_killed_twice_are_those_of_runs_alone(tmp_path, tiny_model):
    async with tinker(tmp_path / "both", tiny_model, '["a","b"]') as (port, run):
        both = [Seen(name, port, tiny_model) for name in CLIENTS]
        await asyncio.gather(*(one.begin() for one in both))
        for phase in range(PHASES):
            training = [asyncio.ensure_future(one.train()) for one in both]
            if phase:
                most = phase * STEPS
                await until(lambda most=most: any(len(one.logprobs) > most for one in both))
                (process,) = run.find(CONTROLLER if phase == 2 else f"{TRAINER} ")
                kill(process)
            await asyncio.gather(*training)
            await asyncio.gather(*(one.sample() for one in both))
        for one in both:
            await one.close()
    summary = summary_of(tmp_path / "both" / "own")
    check_ledger(summary)
    assert summary["steps"] == 2 * (1 + PHASES * (STEPS + 1))
    replay = succeed("replay", tmp_path / "both" / "own", cwd=tmp_path, limit_s=200)
    assert replay.stdout.count("as recorded") == summary["steps"]
    async with tinker(tmp_path / "alone", tiny_model, '["a"]') as (port, _):
        for seen in both:
            alone = Seen("one" if seen is both[0] else "two", port, tiny_model)
            await alone.begin()
            for _ in range(PHASES):
                await alone.train()
                await alone.sample()
            await alone.close()
            assert seen.logprobs == alone.logprobs
            assert seen.sampled == alone.sampled
    for seen in both:
        assert sum(seen.logprobs[-1]) > sum(seen.logprobs[0]) + 1.0
    assert both[0].sampled[-1] != both[1].sampled[-1]
