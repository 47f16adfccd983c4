r"""What a steady flow of requests costs beside a wave, and which way of taking prompts is best.

In a wave all requests start together. In the flow requests of unequal lengths end and begin all the
time, as in an asynchronous run, and nearly every step of the engine could have a new prompt. A turn
of the flow starts with replies in their middle, and its tokens are counted while every place is
taken: neither its first steps nor its end, where places stay empty.

Two engines take turns, each with a whole rollout server around it: `ours`, and one that captures
the CUDA graphs of vLLM's own choice, or one whose attention is vLLM's. What prompts do is chosen
anew for each turn: `wait-0-32` takes each at once; `wait-32-16` lets them wait until there is one
for every 16 replies under way, 32 steps at most. With `-vllms-plans` vLLM's own code plans every
step and takes every token; else ours does where replies only go on. Before that our engine proves
that its replies are those that vLLM hands out token by token.

    python -m benchmarks.rollout.flow                                  # one GPU, 7 minutes
    python -m benchmarks.rollout.flow --device cpu --repeats 1         # a rehearsal
    python -m benchmarks.rollout.flow --before FOLDER --kv-gib 44 --repeats 5
    python -m benchmarks.rollout.flow --shape qwen3-8b --memory 0.3 --kv-gib 34 \
        --quantization fp8_per_channel

With `--dtypes bfloat16 float16` there is one engine for each type of numbers. With
`--quantization` the two engines are one in bfloat16 and one with linear layers in FP8, and
with `--kv-cache-dtype fp8` the latter's KV cache too. With `--before FOLDER` ours takes turns with
the engine of another copy of this repository, a wave and a flow each.

Prints one table; benchmarks/results/flow.json, or flow-fp8.json with `--quantization`, is written
after every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
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
from benchmarks.rollout.engines import Turn
from benchmarks.rollout.flow_engine import KINDS, MODES
from benchmarks.rollout.setup import (
    Found,
    Server,
    add_size_arguments,
    config_text,
    fill_sizes,
    make_model,
)

NAME = "flow"
TARGET = 0.95
TURN_LIMIT_S = 120.0
# vLLM's arguments of each engine.
ENGINES: dict[str, dict[str, object]] = {
    "ours": {},
    "vllm's graphs": {"max_cudagraph_capture_size": 512},
    "vllm's attention": {"attention_config": {"backend": "FLASH_ATTN"}},
    # The engine of another copy of the repository.
    "before": {},
}
# Where Python looks for our packages and programs.
ROOTS = ("protos", "core", "client", "environments", "rollout_server", "learner", "extensions")
OFF = "wait-0-32"
CHOSEN = "wait-32-32"
VLLMS = "-vllms-plans"
# Engine, lever, whether it is a wave: a round takes all of them.
ROUND = (
    ("ours", CHOSEN, True),
    ("ours", CHOSEN + VLLMS, True),
    ("ours", CHOSEN, False),
    ("before", CHOSEN, True),
    ("before", CHOSEN, False),
    ("vllm's attention", CHOSEN, True),
    ("vllm's attention", CHOSEN, False),
    ("vllm's graphs", OFF + VLLMS, True),
    ("vllm's graphs", OFF + VLLMS, False),
    ("ours", OFF, False),
    ("ours", CHOSEN + VLLMS, False),
    ("vllm's graphs", CHOSEN, False),
    ("ours", "wait-32-16", False),
    ("ours", "wait-32-64", False),
)
WAVE = f"wave: ours, {CHOSEN}"
PLAIN = "bfloat16"
FP8_TARGET = 1.40
DTYPE_TARGET = 0.97


class Benchmark(Found):
    """Engines that differ in arguments of vLLM's, in numbers or in quantisation."""

    async def start(self, stack: contextlib.AsyncExitStack, name: str, folder: Path) -> None:
        """Starts one engine; its server joins a fleet of its own."""
        values: dict[str, object] = ENGINES.get(name, {})
        quantization = "off"
        if name not in ENGINES and name != PLAIN and not self.arguments.dtypes:
            values = {"kv_cache_dtype": self.arguments.kv_cache_dtype}
            quantization = self.arguments.quantization
        dtype = name if self.arguments.dtypes else self.arguments.dtype
        if self.arguments.kv_gib:
            values = values | {"kv_cache_memory_bytes": int(self.arguments.kv_gib * (1 << 30))}
        own = {"engine": json.dumps(values), "quantization": quantization}
        own |= {"agreement": "bits" if dtype == "bits" else "close"}
        own["dtype"] = dtype = dtype.replace("bits", "bfloat16")
        arguments = argparse.Namespace(**{**vars(self.arguments), **own})
        make_model(folder / "model", arguments.shape, dtype)
        (folder / "config.toml").write_text(config_text(arguments, folder))
        command = list(program("rollout.flow_engine"))
        if name == "before":
            roots = ":".join(str(self.arguments.before / root) for root in (*ROOTS, ".", "tests"))
            # -P: the folder that the program starts in is not looked at first.
            command = [
                "env",
                f"PYTHONPATH={roots}:{os.environ.get('PYTHONPATH', '')}",
                command[0],
                "-P",
                *command[1:],
            ]
        await self.serve(stack, name, command, folder)

    async def take(self, name: str, lever: str, *, wave: bool, warm_up: bool = False) -> None:
        if name not in self.servers:
            return
        row = f"{'wave' if wave else 'flow'}: {name}, {lever}"
        with part(f"{'warm up ' if warm_up else ''}{row}", self.failures):
            server = self.servers[name]
            await server.ask(lever)
            before = server.cpu_s()
            found = await (self._wave if wave else self._flow)(server, short=warm_up)
            after = server.cpu_s()
            found["cpu_s"] = {party: seconds - before[party] for party, seconds in after.items()}
            speed = found["tokens"] / found["window_s"]
            progress(f"{speed:,.0f} tokens/s {json.dumps(found)}")
            if not warm_up:
                self.keep(row, found)

    async def _wave(self, server: Server, *, short: bool) -> dict[str, Any]:
        slots = self.arguments.concurrent
        length = 32 if short else self.arguments.reply_tokens
        await server.ask("mark")
        turn = Turn(self.seeds(slots), slots, slots, length, length)
        result = await server.episodes(turn, TURN_LIMIT_S)
        found = await server.ask("report")
        return found | {"tokens": result["tokens"], "window_s": result["seconds"]}

    async def _flow(self, server: Server, *, short: bool) -> dict[str, Any]:
        slots = self.arguments.concurrent
        length = 32 if short else self.arguments.reply_tokens
        turn = Turn(
            self.seeds(2 * slots), 2 * slots, slots, length // 2, length + length // 2, True
        )
        # The turn would clear it later than it is looked at.
        server.fleet.trajectories.clear()
        async with asyncio.TaskGroup() as group:
            whole = group.create_task(server.episodes(turn, TURN_LIMIT_S))
            # A place that is free is taken again from here on, and until the last one is leased.
            await _arrived(server, slots // 4, whole)
            await server.ask("mark")
            await _arrived(server, slots, whole)
            found = await server.ask("report")
        return found | {"whole": whole.result()}

    def table(self) -> list[str]:
        return table_of(self.turns)


async def _arrived(server: Server, number: int, turn: asyncio.Task[Any]) -> None:
    while len(server.fleet.trajectories) < number and not turn.done():
        await asyncio.sleep(0.002)


async def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    """All engines side by side, in rounds, until time is over."""
    sys.path.insert(0, str(ROOT / "tests"))
    began_s = time.monotonic()
    found = Benchmark(arguments)
    async with contextlib.AsyncExitStack() as stack:

        async def start(name: str) -> None:
            with part(f"start {name}", found.failures):
                await found.start(stack, name, folder / name.replace(" ", "-").replace("'", ""))

        if arguments.kv_gib:
            await asyncio.gather(*map(start, arguments.engines))
        for name in arguments.engines:
            if not arguments.kv_gib:
                await start(name)
            await found.take(name, OFF, wave=True, warm_up=True)
            await found.take(name, CHOSEN, wave=False, warm_up=True)
        checked = "ours"
        turns = ROUND
        if arguments.chosen or arguments.before:
            turns = tuple(each for each in ROUND if each[1] == CHOSEN)
        if arguments.quantization != "off" or arguments.dtypes:
            checked = arguments.engines[-1]
            turns = tuple((name, CHOSEN, False) for name in arguments.engines)
        await found.prove(checked)
        for _ in range(arguments.repeats):
            for name, lever, wave in turns:
                if time.monotonic() - began_s < arguments.limit_s:
                    await found.take(name, lever, wave=wave)
    found.show()


def table_of(turns: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Medians of turns; ratios are those of the medians, to the wave."""
    plain = f"flow: {PLAIN}, {CHOSEN}"
    base = WAVE
    party = "the wave"
    target = TARGET
    if plain in turns:
        others_gain = any(name.startswith("flow: fp8") for name in turns)
        base = plain
        party = PLAIN
        target = FP8_TARGET if others_gain else DTYPE_TARGET
    header = ["", "tokens/s (min-max)", f"ratio to {party}", "steps that take prompts"]
    header += ["steps in a full graph, in several, in none", "replies in a step", "a step, ms"]
    header += ["engine's thread at work in one without and with prompts, ms"]
    header += ["first token after, ms: p50, p99"]
    speeds = {
        row: Spread.of([turn["tokens"] / turn["window_s"] for turn in found])
        for row, found in turns.items()
    }
    rows: list[Sequence[object]] = []
    for row, found in turns.items():
        ratio = f"{speeds[row].median / speeds[base].median:.3f}" if base in speeds else ""
        rows.append([row, speeds[row].text(0), ratio, *_step_cells(found)])
    return table(header, [*rows, ["target", "", f"{target:.2f}", "", "", "", "", "", ""]])


def _step_cells(turns: Sequence[dict[str, Any]]) -> list[str]:
    def total(name: str, *kinds: str) -> float:
        return sum(turn[kind][name] for turn in turns for kind in kinds)

    def work_ms(kind: str) -> str:
        work = sum(total(name, kind) for name in ("plan", "start", "sample", "take"))
        steps = total("steps", kind)
        return f"{1000 * work / steps:.1f}" if steps else "-"

    steps = total("steps", *KINDS)
    if not steps:
        return [""] * 6
    graphs = [total(mode, *KINDS) / steps for mode in reversed(MODES)]
    firsts = [turn["first_token_s"] for turn in turns if "first_token_s" in turn]
    return [
        f"{total('steps', 'prompts') / steps:.2f}",
        ", ".join(f"{share:.2f}" for share in graphs),
        f"{total('replies', *KINDS) / steps:.0f}",
        f"{1000 * total('whole', *KINDS) / steps:.2f}",
        ", ".join(map(work_ms, KINDS)),
        ", ".join(
            f"{1000 * Spread.of([first[name] for first in firsts]).median:.0f}"
            for name in ("p50", "p99")
            if firsts
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_size_arguments(parser)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES)[:2])
    parser.add_argument(
        "--dtypes", nargs="+", default=[], help="an engine for each, plain; bits: bfloat16, alike"
    )
    parser.add_argument("--chosen", action="store_true", help="a server's own lever alone")
    parser.add_argument("--before", type=Path, help="folder of another copy of the repository")
    parser.add_argument("--limit-s", type=float, default=360.0, help="no turn begins later")
    parser.add_argument(
        "--kv-gib",
        type=float,
        help="KV cache of each engine; vLLM then measures no memory, and engines start at once",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the quantised engine")
    arguments = parser.parse_args()
    arguments.name = NAME
    if arguments.dtypes:
        arguments.name = f"{NAME}-dtypes"
        arguments.engines = arguments.dtypes
    elif arguments.quantization != "off":
        arguments.name = f"{NAME}-fp8"
        arguments.engines = [PLAIN, arguments.quantization]
    elif arguments.before:
        arguments.before = arguments.before.resolve()
        arguments.name = f"{NAME}-before"
        arguments.engines = ["ours", "before"]
    fill_sizes(arguments)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(benchmark(arguments, Path(folder)))


if __name__ == "__main__":
    main()
