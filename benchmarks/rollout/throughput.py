"""What a rollout server's tokens cost beside bare vLLM, with and without log-probabilities.

Ours are requests through `VllmEngine`, the object that the server uses, with the sampled token's
log-probability and version; and, in the same process, whole episodes: leases from a controller that
a test plays, an environment's worker processes, trajectories delivered over gRPC. The peer is bare
vLLM: AsyncLLM with the same model and settings, no log-probabilities, only final outputs, no text.

In a wave all requests start together and the turn ends with the last one, as in a synchronous run:
what comes before the first step and after the last one counts. In a flow twice as many requests, of
unequal lengths, go through the same number of slots; the next one begins when one ends, as in an
asynchronous run. Engines live side by side on the device and take turns; all weights are random
(vLLM's "dummy" format). Before that our engine proves that its log-probabilities are those that
vLLM hands out token by token (`engines.py`). With `bench` vLLM's own benchmark of its
throughput takes turns too, in both of its modes, in a process that is started for each.

    python -m benchmarks.rollout.throughput --repeats 5          # one GPU, 5 minutes
    python -m benchmarks.rollout.throughput --engines ours bench # vLLM's own benchmark
    python -m benchmarks.rollout.throughput --engines ours bare --quantization fp8_per_channel
    python -m benchmarks.rollout.throughput --device cpu --repeats 2  # a rehearsal

Prints one table; benchmarks/results/rollout.json is written after every turn: rollout-bench.json
with `bench`, rollout-fp8.json with `--quantization`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from slipstream.core.configuration.config_file import load_config

from benchmarks.common.measure import (
    ROOT,
    Spread,
    note,
    part,
    program,
    progress,
    table,
    write_result,
)
from benchmarks.rollout.engines import REPLY, START_LIMIT_S, Sizes, Turn
from benchmarks.rollout.entry_point import MODES, EntryPoint
from benchmarks.rollout.episodes import Episodes
from benchmarks.rollout.setup import add_size_arguments, config_text, fill_sizes, make_model

NAME = "rollout"
# Ratios to the peer that are asked for; the second with `--quantization`, in a flow.
TARGET, FP8_TARGET = 0.90, 1.40
RUN_LIMIT_S = 240.0


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    process: str
    # What the process does in a turn; "episodes": the controller's side gives its server leases.
    what: str
    flow: bool = False

    def turn(self, arguments: argparse.Namespace, first_seed: int) -> Turn:
        slots, length = arguments.concurrent, arguments.reply_tokens
        if self.flow:
            return Turn(first_seed, 2 * slots, slots, length // 2, length + length // 2)
        return Turn(first_seed, slots, slots, length, length)


PEER = Row("bare vLLM without log-probabilities", "bare", "none")
FLOWING_PEER = Row("bare vLLM without log-probabilities, flow", "bare", "none", flow=True)
WAVES = (
    Row("ours, engine with log-probabilities", "ours", "engine"),
    Row("ours, whole server with episodes", "ours", "episodes"),
    PEER,
)
FLOWS = (
    Row("ours, whole server with episodes, flow", "ours", "episodes", flow=True),
    FLOWING_PEER,
)
# A flow is long, and this is slow: they alternate.
WITH_LOGPROBS = (Row("bare vLLM with log-probabilities", "bare", "logprobs"),)
# vLLM's own benchmark; it starts anew for each turn.
ENTRY_POINTS = tuple(Row(f"vllm bench throughput, {mode}", "bench", mode) for mode in MODES)
ENGINES = ("ours", "bare", "bench")
DEFAULT_ENGINES = ("ours", "bare")


@dataclass
class EngineProcess:
    """A child with an engine."""

    child: asyncio.subprocess.Process

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, command: Sequence[str], folder: Path, address: str, sizes: Sizes
    ) -> AsyncIterator[EngineProcess]:
        """Ready, or RuntimeError."""
        child = await asyncio.create_subprocess_exec(
            *(*command, str(folder), address),
            json.dumps(dataclasses.asdict(sizes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        engine = cls(child)
        try:
            await engine._answer(START_LIMIT_S)
            yield engine
        finally:
            if child.stdin is not None:
                child.stdin.close()
            try:
                await asyncio.wait_for(child.wait(), 60)
            except TimeoutError:
                child.kill()

    async def run(self, what: str, turn: Turn) -> dict[str, Any]:
        """What one run found: its tokens and seconds."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what} {json.dumps(dataclasses.asdict(turn))}\n".encode())
        return await self._answer(RUN_LIMIT_S)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of its own process, and of vLLM's below it."""
        process = psutil.Process(self.child.pid)
        below = process.children(recursive=True)
        engine = [each for each in below if "slipstream.client" not in " ".join(each.cmdline())]
        return {"server": _cpu_s([process]), "engine": _cpu_s(engine)}

    async def meanwhile(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """What `work` finds; RuntimeError when the child ends before."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self.child.wait())
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not working.done():
            working.cancel()
            raise RuntimeError("the engine's process ended; its own message stands above")
        return await working

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self.child.stdout is not None
        async with asyncio.timeout(limit_s):
            while line := (await self.child.stdout.readline()).decode():
                if line.startswith(REPLY):
                    record: dict[str, Any] = json.loads(line.removeprefix(REPLY))
                    if "error" in record:
                        raise RuntimeError(record["error"])
                    return record
        raise RuntimeError("the engine's process ended")


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


@dataclass
class Benchmark:
    """What runs and what was found."""

    arguments: argparse.Namespace
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    entry_point: EntryPoint | None = None
    episodes: dict[str, Episodes] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    async def start(self, stack: contextlib.AsyncExitStack, role: str, folder: Path) -> None:
        """Starts one engine; a server joins a fleet of its own."""
        from support.fakes.fake_fleet import FakeFleet

        arguments = self.arguments
        sizes = Sizes(arguments.prompt_tokens, arguments.reply_tokens)
        fleet = await stack.enter_async_context(FakeFleet(heartbeat_s=0.5, heartbeat_timeout_s=20))
        command = [*program("rollout.engines"), role]
        starting = EngineProcess.start(command, folder, fleet.address, sizes)
        self.engines[role] = engine = await stack.enter_async_context(starting)
        if role != "bare":
            episodes = Episodes(fleet, engine.meanwhile, arguments)
            async with asyncio.timeout(START_LIMIT_S):
                await episodes.join()
            self.episodes[role] = episodes

    async def take(self, row: Row, turn: Turn, *, warm_up: bool = False) -> None:
        if row.process not in self.engines:
            return
        with part(f"{'warm up ' if warm_up else ''}{row.name}", self.failures):
            engine = self.engines[row.process]
            before = engine.cpu_s()
            if row.what == "episodes":
                result = await self.episodes[row.process].run(turn, RUN_LIMIT_S)
            else:
                result = await engine.run(row.what, turn)
            result["requests"] = turn.requests
            result["cpu_s"] = {name: s - before[name] for name, s in engine.cpu_s().items()}
            progress(f"{result['tokens'] / result['seconds']:,.0f} tokens/s, cpu {result['cpu_s']}")
            if not warm_up:
                self.turns[row.name].append(result)
                note(NAME, {"row": row.name, **result})
                self.write()

    async def take_entry_point(self, row: Row, turn: Turn) -> None:
        if self.entry_point is None:
            return
        with part(row.name, self.failures):
            result = await self.entry_point.run(row.what, turn)
            progress(f"{result['tokens'] / result['seconds']:,.0f} tokens/s")
            self.turns[row.name].append(result)
            note(NAME, {"row": row.name, **result})
            self.write()

    async def take_turns(self) -> None:
        """All rows of both engines, interleaved; what they do first compiles and fills caches."""
        arguments = self.arguments
        for row in (*WAVES, *WITH_LOGPROBS):
            turn = row.turn(arguments, self._seeds(arguments.concurrent))
            short = dataclasses.replace(turn, least_tokens=32, most_tokens=32)
            await self.take(row, short, warm_up=True)
        for repeat in range(arguments.repeats):
            slow = WITH_LOGPROBS if repeat % 2 else FLOWS
            for row in FLOWS if arguments.flow_only else (*WAVES, *slow):
                await self.take(row, row.turn(arguments, self._seeds(2 * arguments.concurrent)))
            for row in ENTRY_POINTS:
                turn = row.turn(arguments, self._seeds(arguments.concurrent))
                await self.take_entry_point(row, turn)

    def _seeds(self, number: int) -> int:
        self.seed += number
        return self.seed - number

    @property
    def target(self) -> float:
        return TARGET if self.arguments.quantization == "off" else FP8_TARGET

    def write(self) -> None:
        record = {
            "settings": {key: str(value) for key, value in vars(self.arguments).items()},
            "check": self.check,
            "turns": self.turns,
            "table": table_of(self.turns, self.target),
            "failures": self.failures,
        }
        write_result(self.arguments.name, record, self.arguments.out)


async def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    found = Benchmark(arguments)
    async with contextlib.AsyncExitStack() as stack:
        if "bench" in arguments.engines:
            config = load_config(folder / "config.toml")
            sizes = Sizes(arguments.prompt_tokens, arguments.reply_tokens)
            found.entry_point = EntryPoint(config, sizes, folder / "bench.log")
        for role in [role for role in arguments.engines if role in ("ours", "bare")]:
            with part(f"start {role}", found.failures):
                await found.start(stack, role, folder)
        with part("check our log-probabilities and a pause", found.failures):
            if "ours" in found.engines:
                found.check = await found.engines["ours"].run("check", Turn(0, 0, 0, 0, 0))
                progress(json.dumps(found.check))
                note(NAME, {"row": "check", **found.check})
        await found.take_turns()
    found.write()
    print("\n".join(table_of(found.turns, found.target)))
    for name in found.failures:
        print(f"FAILED: {name}")


def table_of(turns: dict[str, list[dict[str, Any]]], target: float) -> list[str]:
    """Medians; ratios are those of the medians, against vLLM without log-probabilities.

    That is the bare engine, or the better mode of vLLM's own benchmark where there is none.
    """

    def speed(row: Row) -> Spread | None:
        found = turns.get(row.name)
        return Spread.of([turn["tokens"] / turn["seconds"] for turn in found]) if found else None

    entry_points = [found for row in ENTRY_POINTS if (found := speed(row))]
    best = max(entry_points, key=lambda found: found.median, default=None)
    rows: list[Sequence[object]] = []
    for row in (*WAVES, *ENTRY_POINTS, *WITH_LOGPROBS, *FLOWS):
        ours, peer = speed(row), speed(FLOWING_PEER) if row.flow else speed(PEER) or best
        if ours is None:
            continue
        ratio = f"{ours.median / peer.median:.3f}" if peer else ""
        rows.append([row.name, ours.text(0), ratio, *cpu_cells(turns[row.name])])
    rows.append(["target", "", f"{target:.2f}", "", ""])
    header = ["", "tokens/s (min-max)", "ratio to the peer"]
    return table([*header, "server's CPU, ms/1,000 tokens", "engine's CPU, ms/1,000 tokens"], rows)


def cpu_cells(turns: Sequence[dict[str, Any]]) -> list[str]:
    """Table cells: CPU time of the server's process and of the engine's; "" if not measured."""
    if "cpu_s" not in turns[0]:
        return ["", ""]
    return [
        f"{Spread.of([1e6 * turn['cpu_s'][name] / turn['tokens'] for turn in turns]).median:.1f}"
        for name in ("server", "engine")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_size_arguments(parser)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=DEFAULT_ENGINES)
    parser.add_argument("--engine", default="{}", help="rollout_server.engine of all, as JSON")
    parser.add_argument("--flow-only", action="store_true", help="no waves: flows alone are timed")
    arguments = parser.parse_args()
    arguments.name = f"{NAME}-bench" if "bench" in arguments.engines else NAME
    if arguments.quantization != "off":
        arguments.name = f"{NAME}-fp8"
    fill_sizes(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.shape, arguments.dtype)
        (folder / "config.toml").write_text(config_text(arguments, folder))
        asyncio.run(benchmark(arguments, folder))


if __name__ == "__main__":
    main()
