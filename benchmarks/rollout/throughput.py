r"""What a rollout server's tokens cost beside bare vLLM, with and without log-probabilities.

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
    # What the replay of sampling costs: a second engine of ours records no kept tokens.
    python -m benchmarks.rollout.throughput --engines ours unrecorded bare --memory 0.28 \
        --top-p 0.95 --top-k 20

Prints one table; benchmarks/results/rollout.json is written after every turn: rollout-bench.json
with `bench`, rollout-fp8.json with `--quantization`, rollout-cut.json with `--top-p` or `--top-k`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.measure import (
    ROOT,
    Spread,
    part,
    program,
    progress,
    table,
)
from benchmarks.rollout import entry_point
from benchmarks.rollout.engines import Sizes, Turn
from benchmarks.rollout.setup import (
    RUN_LIMIT_S,
    Found,
    add_size_arguments,
    config_text,
    fill_sizes,
    make_model,
)

NAME = "rollout"
# Ratios to the peer that are asked for; the second with `--quantization`, in a flow.
TARGET = 0.90
FP8_TARGET = 1.40


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    process: str
    # The work of a turn; in "episodes" the controller's side gives the process's server leases.
    what: str
    flow: bool = False

    def turn(self, arguments: argparse.Namespace, first_seed: int) -> Turn:
        slots = arguments.concurrent
        length = arguments.reply_tokens
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
# Our engine where what is sampled is cut, and the learner is not told of it.
WITHOUT_RECORDS = (
    Row("ours, engine, kept tokens not recorded", "unrecorded", "engine"),
    Row("ours, whole server with episodes, kept tokens not recorded", "unrecorded", "episodes"),
)
# vLLM's own benchmark; it starts anew for each turn.
ENTRY_POINTS = tuple(
    Row(f"vllm bench throughput, {mode}", "bench", mode) for mode in entry_point.MODES
)
ENGINES = ("ours", "unrecorded", "bare", "bench")
DEFAULT_ENGINES = ("ours", "bare")


class Benchmark(Found):
    """Our engine, the bare one and vLLM's own benchmark."""

    async def take(self, row: Row, turn: Turn, *, warm_up: bool = False) -> None:
        if row.process not in self.servers:
            return
        with part(f"{'warm up ' if warm_up else ''}{row.name}", self.failures):
            server = self.servers[row.process]
            before = server.cpu_s()
            if row.what == "episodes":
                result = await server.episodes(turn, RUN_LIMIT_S)
            else:
                result = await server.ask(row.what, turn)
            result["requests"] = turn.requests
            after = server.cpu_s()
            result["cpu_s"] = {name: s - before[name] for name, s in after.items()}
            progress(f"{result['tokens'] / result['seconds']:,.0f} tokens/s, cpu {result['cpu_s']}")
            if not warm_up:
                self.keep(row.name, result)

    async def take_entry_point(self, row: Row, turn: Turn) -> None:
        sizes = Sizes(self.arguments.prompt_tokens, self.arguments.reply_tokens)
        with part(row.name, self.failures):
            result = await entry_point.run(self.arguments.folder, sizes, row.what, turn)
            progress(f"{result['tokens'] / result['seconds']:,.0f} tokens/s")
            self.keep(row.name, result)

    async def take_turns(self) -> None:
        """All rows of both engines, interleaved; what they do first compiles and fills caches."""
        arguments = self.arguments
        for row in (*WAVES, *WITHOUT_RECORDS, *WITH_LOGPROBS):
            turn = row.turn(arguments, self.seeds(arguments.concurrent))
            short = dataclasses.replace(turn, least_tokens=32, most_tokens=32)
            await self.take(row, short, warm_up=True)
        for repeat in range(arguments.repeats):
            slow = WITH_LOGPROBS if repeat % 2 else FLOWS
            rows = FLOWS if arguments.flow_only else (*WAVES, *WITHOUT_RECORDS, *slow)
            for row in rows:
                await self.take(row, row.turn(arguments, self.seeds(2 * arguments.concurrent)))
            for row in ENTRY_POINTS if "bench" in arguments.engines else ():
                turn = row.turn(arguments, self.seeds(arguments.concurrent))
                await self.take_entry_point(row, turn)

    @property
    def target(self) -> float:
        return TARGET if self.arguments.quantization == "off" else FP8_TARGET

    def table(self) -> list[str]:
        return table_of(self.turns, self.target)


async def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    measured = Benchmark(arguments)
    async with contextlib.AsyncExitStack() as stack:
        for role in [role for role in arguments.engines if role != "bench"]:
            with part(f"start {role}", measured.failures):
                role_folder = folder
                if role == "unrecorded":
                    role_folder = folder / role
                    role_folder.mkdir()
                    text = config_text(arguments, folder, records_kept_tokens=False)
                    (role_folder / "config.toml").write_text(text)
                command = [*program("rollout.engines"), role]
                await measured.serve(stack, role, command, role_folder)
        await measured.prove("ours")
        await measured.take_turns()
    measured.show()


def table_of(turns: dict[str, list[dict[str, Any]]], target: float) -> list[str]:
    """Medians; ratios are those of the medians, against vLLM without log-probabilities.

    That is the bare engine, or the better mode of vLLM's own benchmark where there is none.
    """

    def speed(row: Row) -> Spread | None:
        row_turns = turns.get(row.name)
        if not row_turns:
            return None
        return Spread.of([turn["tokens"] / turn["seconds"] for turn in row_turns])

    entry_points = [spread for row in ENTRY_POINTS if (spread := speed(row))]
    best = max(entry_points, key=lambda spread: spread.median, default=None)
    rows: list[Sequence[object]] = []
    for row in (*WAVES, *WITHOUT_RECORDS, *ENTRY_POINTS, *WITH_LOGPROBS, *FLOWS):
        ours = speed(row)
        peer = speed(FLOWING_PEER) if row.flow else speed(PEER) or best
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
    if arguments.top_k or arguments.top_p < 1:
        arguments.name = f"{NAME}-cut"
    fill_sizes(arguments)
    with tempfile.TemporaryDirectory() as name:
        arguments.folder = folder = Path(name)
        make_model(folder / "model", arguments.shape, arguments.dtype)
        (folder / "config.toml").write_text(config_text(arguments, folder))
        asyncio.run(benchmark(arguments, folder))


if __name__ == "__main__":
    main()
