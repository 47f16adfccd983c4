"""What drafts bring a flow of rollouts whose texts repeat each other, beside the same without.

The model has the whole shape and cost of its size, but recites: each token names the next one of a
long text. How often it slips to another place of that text follows from the temperature. Members of
a group recite the same part; in a second epoch the same groups come again. As many requests as
there are places run at all times, and tokens are counted after the first seconds.

Each engine has a process of its own. All start side by side and are measured in turns.

    python -m benchmarks.rollout.drafts                            # one GPU, 6 minutes
    python -m benchmarks.rollout.drafts --device cpu --window-s 4  # a rehearsal

Prints one table; benchmarks/results/drafts.json is written after every case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import part, program, progress, settings_of, table, write_result
from benchmarks.common.shapes import RECITER_LOGIT, SHAPES, make_reciter

NAME = "drafts"
TARGET = 1.3
GROUP = 16
PLAIN = "off"
# Settings of `rollout_server` of each engine.
ENGINES: dict[str, dict[str, object]] = {
    PLAIN: {},
    "shared": {"drafts": "shared"},
}
# Prompts have a part of the text; replies go on behind it.
PROMPT_TOKENS = 128
SETTLING_S = 8.0
CHECKED = ("went_on", "mean_logprob")
LEAST_TOKENS, MOST_TOKENS = 256, 768


def text_of(shape: str) -> int:
    """The number of tokens of the text that a model of this shape recites."""
    return SHAPES[shape].vocab // 4


def request_of(number: int, epoch: int, shape: str) -> tuple[list[int], int]:
    """The prompt and the length of the reply of a request; members of a group share the prompt."""
    length = text_of(shape)
    start = random.Random(number // GROUP).randrange(length)
    prompt = [(start + place) % length for place in range(PROMPT_TOKENS)]
    chosen = random.Random(f"{epoch} {number}")
    return prompt, chosen.randint(LEAST_TOKENS, MOST_TOKENS)


def slip(probability: float, shape: str) -> float:
    """The temperature at which the model goes on with its text with this probability."""
    # The next token's logit is RECITER_LOGIT, all others are about 0.
    others = math.log(SHAPES[shape].vocab)
    return RECITER_LOGIT / (others + math.log(probability / (1 - probability)))


class Flow:
    """Requests that run in all places of an engine until they are stopped."""

    def __init__(self, engine: Any, shape: str) -> None:  # noqa: ANN401 - needs vLLM to name it
        self._engine, self._shape = engine, shape
        self._first = self._next = 0
        self._followed: list[Any] = []
        self._logprobs: list[Any] = []

    async def run(
        self,
        *,
        places: int,
        temperature: float,
        epoch: int,
        window_s: float,
    ) -> dict[str, Any]:
        """Counts tokens for `window_s`, after some seconds of the same."""
        if epoch == 1:
            self._first += 1 << 20
        self._next = self._first
        running = [
            asyncio.create_task(self._place(temperature, epoch, place)) for place in range(places)
        ]
        # The engine finds out meanwhile whether drafts pay here.
        await asyncio.sleep(SETTLING_S)
        self._followed, self._logprobs = [], []
        before, began_s = self._engine.use(), time.perf_counter()
        await asyncio.sleep(window_s)
        after, took_s = self._engine.use(), time.perf_counter() - began_s
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        return {
            "tokens_per_s": (after.generated_tokens - before.generated_tokens) / took_s,
            "drafted": drafted,
            "accepted": accepted,
            # Both follow from the model alone: drafts must not change them.
            "went_on": float(np.concatenate(self._followed).mean()) if self._followed else None,
            "mean_logprob": (
                float(np.concatenate(self._logprobs).mean()) if self._logprobs else None
            ),
            "checked_tokens": sum(map(len, self._followed)),
        }

    async def _place(self, temperature: float, epoch: int, place: int) -> None:
        from slipstream.rollout_server.engine_interface import Sampling

        longest = PROMPT_TOKENS + MOST_TOKENS
        sampling = Sampling(temperature, 1.0, 0, MOST_TOKENS, 1, longest, ignore_eos=True)
        while True:
            number = self._next
            self._next += 1
            prompt, length = request_of(number, epoch, self._shape)
            name = f"{epoch}-{temperature}-{place}-{number}"
            reply = await self._engine.generate(name, prompt, sampling, length)
            if len(reply.token_ids) != length:
                raise RuntimeError(f"{len(reply.token_ids)} tokens of {length}")
            text = text_of(self._shape)
            tokens = reply.token_ids.astype(np.int64)
            self._followed.append(tokens[1:] == (tokens[:-1] + (tokens[:-1] < text)) % text)
            self._logprobs.append(reply.logprobs)


async def measure_engine(arguments: argparse.Namespace) -> None:
    """One engine: prints READY, then a line of JSON for each case that its input names."""
    from slipstream.core.configuration.config_file import parse_config
    from slipstream.core.types import PolicyVersion
    from slipstream.rollout_server import process

    table = {
        "run": {"name": "drafts", "steps": 1, "dir": str(arguments.folder)},
        "model": {"path": str(arguments.folder / "model"), "dtype": arguments.dtype},
        "algorithm": {"group_size": GROUP, "groups_per_step": 1, "learning_rate": 1e-5},
        "sampling": {
            "max_reply_tokens": MOST_TOKENS,
            "max_episode_tokens": PROMPT_TOKENS + MOST_TOKENS,
        },
        "learner": {"micro_batch_tokens": PROMPT_TOKENS + MOST_TOKENS},
        "rollout_server": {
            "max_episodes": arguments.places,
            "gpu_memory_utilization": arguments.memory,
            "engine": {"kv_cache_memory_bytes": int(arguments.kv_gib * (1 << 30))},
            **ENGINES[arguments.engine],
        },
    }
    config = parse_config(table, source=NAME)
    on_cpu = arguments.device == "cpu"
    os.environ |= process.engine_environment(config, on_cpu=on_cpu)
    from slipstream.rollout_server.vllm.engine import VllmEngine

    began_s = time.monotonic()
    engine = await VllmEngine.start(config, seed=1)
    await engine.resume(PolicyVersion(0, 0))
    progress(f"{arguments.engine}: started in {time.monotonic() - began_s:.0f} s")
    flow = Flow(engine, arguments.shape)
    window_s = arguments.window_s
    print("READY", flush=True)
    while case := (await asyncio.to_thread(sys.stdin.readline)).strip():
        places, probability, epoch = (float(part) for part in case.split(","))
        found = await flow.run(
            places=int(places),
            temperature=slip(probability, arguments.shape),
            epoch=int(epoch),
            window_s=window_s,
        )
        print("ROW " + json.dumps({"case": case, **found}), flush=True)
    await engine.aclose_fully()


class RunningEngine:
    """One engine in a process of its own, which measures a case when it is told to."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self._process = name, process

    @classmethod
    async def start(cls, name: str, arguments: argparse.Namespace, folder: Path) -> RunningEngine:
        """Starts the process; the engine is not ready yet."""
        command = [*program("rollout.drafts"), "--engine", name, "--folder", str(folder)]
        for option in ("device", "shape", "dtype", "places", "window_s", "memory", "kv_gib"):
            command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
        pipe = asyncio.subprocess.PIPE
        return cls(
            name,
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24),
        )

    async def until(self, word: str) -> str:
        """Returns the rest of the next line that begins with `word`; RuntimeError at the end."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = line.decode().rstrip()
            progress(f"{self.name}: {said}")
            if said.startswith(word):
                return said[len(word) :]
        raise RuntimeError(f"{self.name} ended with {await self._process.wait()}")

    async def measure(self, case: str) -> dict[str, Any]:
        """Measures a case."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n".encode())
        row: dict[str, Any] = json.loads(await self.until("ROW "))
        return row

    async def aclose(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(30):
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                progress(f"{self.name}: {line.decode().rstrip()}")
            await self._process.wait()


async def measure_all(arguments: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Starts all engines and measures each case with one after the other; returns failures."""
    failures: dict[str, str] = {}
    began_s = time.monotonic()
    started = [await RunningEngine.start(name, arguments, folder) for name in arguments.engines]
    ready = await asyncio.gather(
        *(engine.until("READY") for engine in started), return_exceptions=True
    )
    engines = []
    for engine, found in zip(started, ready, strict=True):
        if isinstance(found, BaseException):
            failures[engine.name] = str(found)
        else:
            engines.append(engine)
    rows: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for case in arguments.cases:
        if time.monotonic() - began_s > arguments.limit_s:
            failures[case] = "not begun: no time was left"
            continue
        for engine in engines:
            with part(engine.name, failures):
                rows[engine.name].append(await engine.measure(case))
        record = {"settings": settings_of(arguments), "rows": rows, "failures": failures}
        write_result(NAME, record | {"table": table_of(rows)}, arguments.out)
    print("\n".join(table_of(rows)), flush=True)
    await asyncio.gather(*(engine.aclose() for engine in engines))
    return failures


def table_of(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One row for each measurement; ratios are to the engine without drafts."""
    header = ["replies at one time", "goes on with its text", "epoch", "drafts", "tokens/s"]
    header += ["ratio", "drafted tokens accepted", "went on", "mean log-probability"]
    plain = {row["case"]: row["tokens_per_s"] for row in found.get(PLAIN, [])}
    rows: list[Sequence[object]] = []
    for case, speed in plain.items():
        for name, measured in found.items():
            for row in measured:
                if row["case"] == case:
                    share = f"{row['accepted'] / row['drafted']:.2f}" if row["drafted"] else "-"
                    cells = [*case.split(","), name, f"{row['tokens_per_s']:,.0f}"]
                    cells += [f"{row['tokens_per_s'] / speed:.2f}", share]
                    rows.append([*cells, *(_digits(row[key]) for key in CHECKED)])
    return table(header, [*rows, ["target", "", "", "", "", f"{TARGET}", "", "", ""]])


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def main() -> None:
    """Measures all engines, or one in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), help="8B; on a CPU small")
    parser.add_argument("--dtype", help="bfloat16; on a CPU float32")
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["64,0.95,1", "64,0.95,2", "64,0.8,2", "8,0.95,2"],
        help="replies at one time, probability that a text goes on, epoch of its groups",
    )
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--memory", type=float, help="share of the GPU for each engine")
    parser.add_argument("--kv-gib", type=float, help="size of each KV cache")
    parser.add_argument("--limit-s", type=float, default=330.0, help="no case begins later")
    parser.add_argument("--engine", choices=list(ENGINES), help="measure this one here")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.shape = arguments.shape or ("small" if on_cpu else "8B")
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    arguments.kv_gib = arguments.kv_gib or (0.5 if on_cpu else 12.0)
    arguments.memory = arguments.memory or round(0.9 / len(arguments.engines), 2)
    if arguments.engine:
        asyncio.run(measure_engine(arguments))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        # A process of its own, whose end frees the GPU.
        chosen = (folder / "model", arguments.shape, text_of(arguments.shape), arguments.dtype)
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            apart.submit(make_reciter, *chosen).result()
        progress("made the model")
        failures = asyncio.run(measure_all(arguments, folder))
    for name in failures:
        print(f"FAILED: {name}")


if __name__ == "__main__":
    main()
