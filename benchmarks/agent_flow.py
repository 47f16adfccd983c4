"""Compares agents with environments of the same turns on a whole rollout server.

A session has several turns. The environment's reply goes back in `step`; the agent calls the
endpoint of its episode over HTTP and repeats the whole conversation, as its clients do. The server
is real, with vLLM and worker processes; leases come from a controller that a test plays. All
sessions start together, and kinds take turns.

    python benchmarks/agent_flow.py --repeats 5                  # one GPU, 4 minutes
    python benchmarks/agent_flow.py --device cpu --repeats 2     # a rehearsal
    python benchmarks/agent_flow.py --repeats 5 --streamed       # and an agent with streamed calls

Prints one table and writes benchmarks/results/agent_flow.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from measure import Spread, note, part, progress, settings_of, table, write_result
from rollout import HERE, EngineProcess
from rollout_engines import START_LIMIT_S, WORDS, Sizes
from rollout_setup import add_size_arguments, config_text, fill_sizes, make_model
from slipstream.client import AgentEnvironment, Endpoint, Environment, StepResult

NAME = "agent_flow"
LIMIT_S = 240.0
MORE_WORDS = 16
KINDS = {"environment": "Turns", "agent": "TurnsAgent"}
STREAMED = {"streamed": "StreamedAgent"}
EVENT = "data: "


def words(seed: int, number: int) -> str:
    """Returns `number` random words."""
    return " ".join(random.Random(seed).choices(WORDS, k=number))


class Turns(Environment[int]):
    """A fixed number of replies, with some new words after each."""

    def __init__(self, num_words: int, turns: int) -> None:
        """`num_words` in every prompt."""
        self._num_words, self._turns, self._done = num_words, turns, 0

    def tasks(self) -> range:
        """Seeds of prompts."""
        return range(1_000_000)

    def reset(self, task: int) -> list[dict[str, str]]:
        """The words of a task."""
        self._task = task
        return [{"role": "user", "content": words(task, self._num_words)}]

    def step(self, reply: str) -> StepResult:
        """Goes on until all turns are done."""
        self._done += 1
        if self._done == self._turns:
            return StepResult(reward=0.0)
        more = words(self._task + self._done, MORE_WORDS)
        return StepResult(done=False, messages=[{"role": "user", "content": more}])


class TurnsAgent(AgentEnvironment[int]):
    """The same conversation, by an agent."""

    def __init__(self, num_words: int, turns: int) -> None:
        """See `Turns`."""
        self._num_words, self._turns = num_words, turns
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(timeout=LIMIT_S, limits=limits, trust_env=False)

    def tasks(self) -> range:
        """Seeds of prompts."""
        return range(1_000_000)

    async def run(self, task: int, endpoint: Endpoint) -> float:
        """Repeats the conversation in each call."""
        messages = [{"role": "user", "content": words(task, self._num_words)}]
        for turn in range(1, self._turns + 1):
            messages.append(await self._reply(messages, endpoint))
            messages.append({"role": "user", "content": words(task + turn, MORE_WORDS)})
        return 0.0

    async def _reply(self, messages: list[dict[str, str]], endpoint: Endpoint) -> dict[str, str]:
        answer = await self._client.send(self._request(messages, endpoint))
        answer.raise_for_status()
        message: dict[str, str] = answer.json()["choices"][0]["message"]
        return message

    def _request(
        self, messages: list[dict[str, str]], endpoint: Endpoint, **asked: object
    ) -> httpx.Request:
        return self._client.build_request(
            "POST",
            f"{endpoint.base_url}/chat/completions",
            json={"model": "policy", "messages": messages, **asked},
            headers={"Authorization": f"Bearer {endpoint.api_key}"},
        )


class StreamedAgent(TurnsAgent):
    """The same conversation, whose replies come in parts."""

    async def _reply(self, messages: list[dict[str, str]], endpoint: Endpoint) -> dict[str, str]:
        request = self._request(messages, endpoint, stream=True)
        answer = await self._client.send(request, stream=True)
        try:
            answer.raise_for_status()
            events = [
                json.loads(line.removeprefix(EVENT))
                async for line in answer.aiter_lines()
                if line.startswith(EVENT) and not line.endswith("[DONE]")
            ]
        finally:
            await answer.aclose()
        choices = [event["choices"][0] for event in events if event.get("choices")]
        if not choices or choices[-1]["finish_reason"] is None:
            raise RuntimeError(f"a stream ended early: {events[-1:]}")
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        return {"role": "assistant", "content": content}


class Leases:
    """Gives sessions to the server and waits for their trajectories."""

    def __init__(self, fleet: Any, arguments: argparse.Namespace) -> None:  # noqa: ANN401
        self._fleet, self._arguments = fleet, arguments
        self._connection: Any = None

    async def join(self) -> None:
        """Waits for the server, gives it a version and all environments."""
        from slipstream.v1 import environment_pb2, fleet_pb2

        self._connection = await self._fleet.joined(60.0)
        await self._connection.serve_version(1, digests=())
        given = {"num_words": self._arguments.prompt_tokens - 2, "turns": self._arguments.turns}
        for name, kind in kinds_of(self._arguments).items():
            spec = environment_pb2.EnvironmentSpec(
                name=name,
                reference=f"agent_flow:{kind}",
                args_json=json.dumps(given),
                timeout_s=LIMIT_S,
                num_workers=self._arguments.workers,
            )
            self._connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
            report = await self._connection.wait_for("environment")
            if not report.num_tasks:
                raise RuntimeError(report.failure.message)

    async def wave(self, kind: str, first: int) -> dict[str, Any]:
        """Runs all sessions of one kind at once; returns tokens and seconds."""
        from slipstream.v1 import fleet_pb2

        arguments = self._arguments
        self._fleet.trajectories.clear()
        started_s = time.perf_counter()
        for number in range(first, first + arguments.concurrent):
            self._connection.lease(
                f"g{number}",
                environment=kind,
                task_index=number,
                members=[0],
                sampling=fleet_pb2.SamplingSettings(
                    temperature=1.0,
                    top_p=1.0,
                    max_reply_tokens=arguments.reply_tokens,
                    max_turns=arguments.turns,
                    max_episode_tokens=longest(arguments),
                    max_branches=16,
                    ignore_eos=True,
                ),
                timeout_s=LIMIT_S,
            )
        found = await self._fleet.wait_trajectories(arguments.concurrent, LIMIT_S)
        seconds = time.perf_counter() - started_s
        failed = {t.failure.message for t in found if t.failure is not None}
        if failed:
            raise RuntimeError(f"episodes failed: {sorted(failed)[:2]}")
        return {
            "tokens": sum(t.num_sampled_tokens for t in found),
            "seconds": seconds,
            "branches": sum(max(1, len(t.branches)) for t in found) / len(found),
        }


def kinds_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the classes of the sessions that are compared, by their names."""
    return KINDS | (STREAMED if arguments.streamed else {})


def longest(arguments: argparse.Namespace) -> int:
    """Returns the tokens of a whole session, with room for its template."""
    added = arguments.reply_tokens + MORE_WORDS + 8
    return int(arguments.prompt_tokens + arguments.turns * added)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the waves of each kind, after one of each that does not count."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.fakes.fake_fleet import FakeFleet

    kinds = kinds_of(arguments)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    failures: dict[str, str] = {}
    sizes = Sizes(arguments.prompt_tokens, arguments.reply_tokens)
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(FakeFleet(heartbeat_s=0.5, heartbeat_timeout_s=20))
        starting = EngineProcess.start("ours", folder, fleet.address, sizes)
        engine = await stack.enter_async_context(starting)
        leases = Leases(fleet, arguments)
        async with asyncio.timeout(START_LIMIT_S):
            await leases.join()
        first = 0
        for repeat in range(-1, arguments.repeats):
            for kind in kinds:
                with part(f"{kind}, repeat {repeat + 1}", failures):
                    before = engine.cpu_s()
                    result = await engine.meanwhile(leases.wave(kind, first))
                    spent = {name: s - before[name] for name, s in engine.cpu_s().items()}
                    result["cpu_s"] = spent
                    progress(f"{result['tokens'] / result['seconds']:,.0f} tokens/s {result}")
                    if repeat >= 0:
                        found[kind].append(result)
                        note(NAME, {"kind": kind, **result})
                first += arguments.concurrent
    if failures:
        raise SystemExit(f"failed: {failures}")
    return found


def main() -> None:
    """Measures, prints the table and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_size_arguments(parser)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--streamed", action="store_true", help="an agent with streamed calls too")
    parser.add_argument("--engine", default="{}", help="rollout_server.engine, as JSON")
    arguments = parser.parse_args()
    arguments.reply_tokens = arguments.reply_tokens or (16 if arguments.device == "cpu" else 128)
    fill_sizes(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.shape, arguments.dtype)
        reply = arguments.reply_tokens
        # The settings have room for a whole session.
        arguments.reply_tokens = longest(arguments)
        (folder / "config.toml").write_text(config_text(arguments, folder))
        arguments.reply_tokens = reply
        found = asyncio.run(measure(arguments, folder))
    speeds = {
        kind: Spread.of([one["tokens"] / one["seconds"] for one in waves])
        for kind, waves in found.items()
    }
    plain = speeds["environment"].median
    rows = [
        (
            kind,
            speed.text(0),
            f"{speed.median / plain:.3f}",
            f"{Spread.of([one['branches'] for one in found[kind]]).median:.2f}",
            f"{Spread.of([one['cpu_s']['server'] for one in found[kind]]).median:.1f}",
        )
        for kind, speed in speeds.items()
    ]
    header = ["session", "tokens/s (min-max)", "of the environment's", "branches", "server's CPU s"]
    lines = table(header, rows)
    print("\n".join(lines))
    record = {"settings": settings_of(arguments), "waves": found, "table": lines}
    progress(f"wrote {write_result(NAME, record, arguments.out)}")


if __name__ == "__main__":
    main()
