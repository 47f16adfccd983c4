"""Measures how long a whole call of an agent takes, beside a turn of an environment.

    python -m benchmarks.agents.latency --sessions 256 --repeats 5

The rollout server, a worker process and their stream are real; the engine replies at once, and the
agent writes to a socket without a client of its own. A call begins before its request is written
and ends when its JSON is read. A turn of an environment begins when the environment hands out its
messages and ends when it is given the reply. Sessions of four turns run one after the other, and
then side by side, with pauses so long that the two cores are not full. The processor time is that
of server and worker together. Prints one table and writes benchmarks/results/agent_latency.json.
Takes two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from slipstream.client import AgentEnvironment, AgentOutcome, Endpoint, Environment, StepResult

from benchmarks.common.measure import (
    ROOT,
    Spread,
    note,
    progress,
    settings_of,
    table,
    write_result,
)

NAME = "agent_latency"
KINDS = {"environment": "Turns", "agent": "TurnsAgent"}
LIMIT_S = 240.0
QUESTION = "a b c d e f"
REPLY = " ".join("abcdefghijklmnop")


async def pause(mean_s: float) -> None:
    """Waits for a random time, so that sessions do not call together."""
    await asyncio.sleep(random.uniform(0, 2 * mean_s))


class BareClient:
    """A client that writes requests to sockets and reads JSON from them: next to no cost."""

    def __init__(self) -> None:
        # Connections without a call.
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def reply(self, asked: list[dict[str, str]], endpoint: Endpoint) -> str:
        """Returns the text of the reply; RuntimeError for every status but 200."""
        url = urllib.parse.urlsplit(endpoint.base_url)
        # The gateway closes a connection that nothing used for minutes.
        self._idle = [pair for pair in self._idle if not pair[0].at_eof()]
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps({"model": "policy", "messages": asked}).encode()
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1",
            f"host: {url.netloc}",
            f"authorization: Bearer {endpoint.api_key}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        length = next(h for h in headers if h.lower().startswith("content-length:"))
        answer = json.loads(await reader.readexactly(int(length.partition(":")[2])))
        self._idle.append((reader, writer))
        if " 200 " not in status:
            raise RuntimeError(f"the endpoint answers {status}: {answer}")
        return str(answer["choices"][0]["message"]["content"] or "")


class Turns(Environment[int]):
    """A session of an environment; its metrics are the milliseconds of each turn."""

    def __init__(self, turns: int, pause_s: float) -> None:
        """`pause_s` is the mean of the pauses before a turn."""
        self._turns = turns
        self._pause_s = pause_s

    def tasks(self) -> range:
        return range(1_000_000)

    async def reset(self, task: int) -> list[dict[str, str]]:
        self._ms: list[float] = []
        await pause(self._pause_s)
        self._began_s = time.perf_counter()
        return [{"role": "user", "content": QUESTION}]

    async def step(self, reply: str) -> StepResult:
        self._ms.append(1e3 * (time.perf_counter() - self._began_s))
        if len(self._ms) == self._turns:
            return StepResult(
                reward=0.0, metrics={f"ms_{at}": value for at, value in enumerate(self._ms)}
            )
        await pause(self._pause_s)
        self._began_s = time.perf_counter()
        return StepResult(done=False, messages=[{"role": "user", "content": QUESTION}])


class TurnsAgent(AgentEnvironment[int]):
    """The same session of an agent, which repeats the whole conversation in each call."""

    def __init__(self, turns: int, pause_s: float) -> None:
        self._turns = turns
        self._pause_s = pause_s
        self._client = BareClient()

    def tasks(self) -> range:
        return range(1_000_000)

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        messages = [{"role": "user", "content": QUESTION}]
        ms = list[float]()
        for _ in range(self._turns):
            await pause(self._pause_s)
            began_s = time.perf_counter()
            reply = await self._client.reply(messages, endpoint)
            ms.append(1e3 * (time.perf_counter() - began_s))
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": QUESTION},
            ]
        return AgentOutcome(0.0, metrics={f"ms_{at}": value for at, value in enumerate(ms)})


def cpu_s() -> float:
    """Returns the processor time of this process and of its workers."""
    this = psutil.Process()
    times = [each.cpu_times() for each in (this, *this.children(recursive=True))]
    return sum(each.user + each.system for each in times)


class Server:
    """A rollout server in this process, whose controller is the benchmark."""

    def __init__(self, fleet: Any, connection: Any, turns: int) -> None:  # noqa: ANN401
        self._fleet = fleet
        self._connection = connection
        self._turns = turns
        self._leases = 0

    async def take(self, name: str, kind: str, pause_s: float) -> None:
        from slipstream.v1 import environment_pb2, fleet_pb2

        spec = environment_pb2.EnvironmentSpec(
            name=name,
            reference=f"benchmarks.agents.latency:{kind}",
            args_json=json.dumps({"turns": self._turns, "pause_s": pause_s}),
            timeout_s=LIMIT_S,
            num_workers=1,
            search_path=str(ROOT),
        )
        self._connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        report = await self._connection.wait_for("environment")
        if not report.num_tasks:
            raise RuntimeError(report.failure.message)

    async def wave(self, name: str, sessions: int) -> list[float]:
        """Runs `sessions` at once; returns the milliseconds of all their turns."""
        from slipstream.v1 import fleet_pb2

        self._fleet.trajectories.clear()
        sampling = fleet_pb2.SamplingSettings(
            temperature=1.0,
            top_p=1.0,
            max_reply_tokens=100,
            max_turns=100,
            max_episode_tokens=1500,
            max_branches=8,
        )
        for _ in range(sessions):
            self._leases += 1
            group = f"g{self._leases}"
            self._connection.lease(
                group, name, members=[0], sampling=sampling, timeout_s=LIMIT_S, max_attempts=1
            )
        found = await self._fleet.wait_trajectories(sessions, LIMIT_S)
        if failed := {t.failure.message for t in found if t.failure is not None}:
            raise RuntimeError(f"episodes failed: {sorted(failed)[:2]}")
        return [t.metrics[f"ms_{number}"] for t in found for number in range(self._turns)]


@contextlib.asynccontextmanager
async def served(folder: Path, turns: int) -> AsyncIterator[Server]:
    sys.path.insert(0, str(ROOT / "tests"))
    from slipstream.core.types import ServerId
    from slipstream.rollout_server.episodes.play import ServedModel
    from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
    from slipstream.rollout_server.service import RolloutServer
    from support.fakes.agent_rig import agent_config, scripted_engine
    from support.fakes.chat_models import make_chat_model
    from support.fakes.fake_fleet import FakeFleet

    model = make_chat_model(folder / "model", with_weights=False)
    config = agent_config(model, max_episodes=1024)
    engine = scripted_engine(config, lambda _: REPLY)
    engine.version = None
    engine.running.clear()
    # What an engine's start does.
    gc.collect()
    gc.freeze()
    stop = asyncio.Event()
    async with FakeFleet(heartbeat_timeout_s=60.0) as fleet:
        gateway = WorkerGateway(folder / "logs", log_bytes=1 << 20)
        served_model = ServedModel(engine, engine.renderer, engine.agents)
        program = RolloutServer(config, fleet.address, ServerId("s"), served_model, gateway)
        running = asyncio.create_task(program.run(stop))
        connection = await fleet.joined()
        await connection.serve_version(1)
        yield Server(fleet, connection, turns)
        stop.set()
        await running


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Returns the median milliseconds of a call in each repeat, and its processor time.

    Both are by kind and number of sessions.
    """
    found: dict[str, dict[str, list[float]]] = {"wall": {}, "cpu": {}}
    async with served(folder, arguments.turns) as server:
        for kind, reference in KINDS.items():
            await server.take(kind, reference, 0.0)
            await server.take(f"{kind}-paced", reference, arguments.pause_s)
        for repeat in range(-1, arguments.repeats):
            for kind in KINDS:
                for sessions in (1, arguments.sessions):
                    before_s = cpu_s()
                    values = list[float]()
                    for _ in range(arguments.alone if sessions == 1 else 1):
                        name = kind if sessions == 1 else f"{kind}-paced"
                        values += await server.wave(name, sessions)
                    cpu = 1e3 * (cpu_s() - before_s) / len(values)
                    wall = float(np.median(values))
                    progress(f"{kind}, {sessions} sessions: {wall:.2f} ms, processor {cpu:.2f} ms")
                    if repeat >= 0:
                        found["wall"].setdefault(f"{kind}, {sessions}", []).append(wall)
                        found["cpu"].setdefault(f"{kind}, {sessions}", []).append(cpu)
                        note(NAME, {"kind": kind, "sessions": sessions, "wall": wall, "cpu": cpu})
    return found


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[tuple[str, ...]]:
    """Returns the rows of the table, each with what it adds to the environment's."""
    rows = []
    for name in found["wall"]:
        kind, _, sessions = name.partition(", ")
        cells = [kind, sessions]
        for values in found.values():
            spread = Spread.of(values[name])
            plain = Spread.of(values[f"environment, {sessions}"])
            cells += [spread.text(2), f"{spread.median - plain.median:.2f}"]
        rows.append(tuple(cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--alone", type=int, default=25, help="sessions one after the other")
    parser.add_argument("--pause-s", type=float, default=4.0, help="mean pause before a call")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(arguments, Path(folder)))
    header = ["session", "at one time", "median of a call, ms (min-max)", "added", "processor, ms"]
    header.append("added")
    lines = table(header, rows_of(found))
    print("\n".join(lines))
    record = {"settings": settings_of(arguments), "ms": found, "table": lines}
    progress(f"wrote {write_result(NAME, record)}")


if __name__ == "__main__":
    main()
