r"""Where do the bits of learner and engine part? Kernel by kernel, and what it costs that none do.

Engines of several modes compute the same tokens in several ways: sampled one by one in a batch and
alone, and as prompts in a batch and alone. A learner's forward pass computes them packed. For each
way the benchmark counts log-probabilities whose bits differ from those of the prompts alone, and
for each kernel the rows that differ though their inputs have the same bits.

    python -m benchmarks.agreement.bits --out FOLDER                # one H200, 7 to 9 minutes
    python -m benchmarks.agreement.bits --device cpu --dtype float32 --out FOLDER

Modes on a GPU: `eager` with vLLM's usual kernels, `eager, invariant` with VLLM_BATCH_INVARIANT=1,
the same two compiled with CUDA graphs, and `graphs, invariant`, whose graphs hold the kernels of
eager mode. Modes on a CPU: `usual`, and `fixed rows`, which multiplies matrices in blocks of 16
rows and never splits the keys of a sequence. All engines of a GPU load at once; each is measured
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slipstream.core.machine.process import die_with_parent

from benchmarks.common.measure import (
    part,
    program,
    settings_of,
    table,
    write_result,
)
from benchmarks.common.shapes import make_apart

NAME = "bits"
PARTS = ("check", "products", "speed", "learn")
# Mode -> variables of its process.
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
MODES: dict[str, dict[str, dict[str, str]]] = {
    "cuda": {
        "eager": {},
        "eager, invariant": INVARIANT,
        "compiled": {},
        "compiled, invariant": INVARIANT,
        "graphs, invariant": INVARIANT,
    },
    "cpu": {"usual": {}, "fixed rows": {"VLLM_CPU_ATTN_SPLIT_KV": "0"}},
}
# The shape of each device.
SHAPES = {"cuda": "0.6B", "cpu": "small"}
# Modes whose process takes a learner's passes too.
LEARNERS = ("eager, invariant", "compiled", "usual", "fixed rows")
START_LIMIT_S, TURN_LIMIT_S = 330.0, 200.0
TURNS = 3


class Child:
    """The program of one mode."""

    def __init__(self, mode: str, arguments: argparse.Namespace) -> None:
        command = [*program("agreement.bits_engine"), "--mode", mode, "--device", arguments.device]
        command += ["--dtype", arguments.dtype, "--head-dtype", arguments.head_dtype]
        command += ["--model-folder", str(arguments.model_folder)]
        self.mode = mode
        self._path = arguments.out / f"{mode.replace(', ', '-').replace(' ', '-')}.log"
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **({"TORCHDYNAMO_DISABLE": "1"} if arguments.device == "cpu" else {}),
            **MODES[arguments.device][mode],
        }
        with self._path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | variables,
                preexec_fn=die_with_parent,
            )

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Returns the next answer; RuntimeError with the log's end if it has failed.

        A silent program is ended: its answer would be taken for that of the next question.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else ""
        found: dict[str, Any] = json.loads(line) if line else {"failed": f"silent for {limit_s} s"}
        if not line:
            self.close()
        if "failed" in found:
            end = self._path.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{self.mode}: {found['failed']}\n{end}")
        return found

    def do(self, name: str) -> dict[str, Any]:
        """Returns what `name` of its engine found."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.mode}: its program has ended")
        print(name, file=self._process.stdin, flush=True)
        return self.answer(TURN_LIMIT_S)

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.wait()


def tables(found: dict[str, Any]) -> list[str]:
    """Returns the tables of what is known by now."""
    rows = [
        [mode, name, one["tokens"], one["differ"], f"{one['mean']:.2g}", f"{one['largest']:.2g}"]
        for mode, checks in found.get("check", {}).items()
        for name, one in checks["logprobs"].items()
    ]
    lines = table(["mode", "way", "tokens", "bits differ", "mean", "largest"], rows)
    rows = [
        [
            mode,
            name,
            one["first"],
            ", ".join(f"{k} {n[1]}/{n[0]}" for k, n in one["kernels"].items() if n[1]),
        ]
        for mode, checks in found.get("check", {}).items()
        for name, one in checks["kernels"].items()
    ]
    lines += ["", *table(["mode", "way", "first", "kernel: rows that differ/equal inputs"], rows)]
    rows = [
        [mode, ", ".join(f"{turn['tokens_per_s']:,.0f}" for turn in turns)]
        for mode, turns in found.get("speed", {}).items()
    ]
    lines += ["", *table(["mode", "tokens/s of each turn"], rows)]
    rows = [
        [
            mode,
            name,
            ", ".join(f"{rows}: {count}" for rows, count in one["rows_that_differ"].items()),
            one["of_permuted_matrix"],
            one["with_two_threads"],
            ", ".join(f"{1e3 * seconds:.3f}" for seconds in one["seconds"].values()),
        ]
        for mode, products in found.get("products", {}).items()
        for name, one in products.items()
    ]
    header = [
        "mode",
        "product",
        "rows: of which differ",
        "permuted",
        "two threads",
        "ms of few and of all rows",
    ]
    lines += ["", *table(header, rows)]
    rows = [
        [
            mode,
            name,
            ", ".join(f"{one:,.0f}" for one in turns),
            "{:.2g} in {}".format(*learn["largest_gradient_error"][name]),
        ]
        for mode, learn in found.get("learn", {}).items()
        for name, turns in learn["tokens_per_s"].items()
    ]
    lines += ["", *table(["mode", "learner's kernels", "tokens/s", "gradient error"], rows)]
    return lines


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=tuple(MODES), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--head-dtype", choices=("float32", "model"), default="float32")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--modes", nargs="+", help="default: all of the device")
    parser.add_argument(
        "--model-folder", type=Path, help="a folder; default: the shape of the device"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    return parser.parse_args()


def main() -> int:
    """Measures every mode; returns 1 if something failed."""
    arguments = parse_arguments()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {name: {} for name in PARTS if name in arguments.parts}
    failures: dict[str, str] = {}

    def write() -> None:
        record = {"settings": settings_of(arguments), **found, "table": tables(found)}
        write_result(NAME, record | {"failures": failures}, arguments.out / f"{NAME}.json")

    with tempfile.TemporaryDirectory() as name:
        if arguments.model_folder is None:
            shape = SHAPES[arguments.device]
            arguments.model_folder = make_apart(Path(name) / shape, shape, dtype=arguments.dtype)
        modes = arguments.modes or list(MODES[arguments.device])
        # On CPUs one engine at a time has memory enough.
        at_once = [modes] if arguments.device == "cuda" else [[mode] for mode in modes]
        for group in at_once:
            children = {mode: Child(mode, arguments) for mode in group}
            measure(children, found, failures, write)
    print("\n".join(tables(found)), flush=True)
    return 1 if failures else 0


def measure(
    children: dict[str, Child],
    found: dict[str, Any],
    failures: dict[str, str],
    write: Callable[[], None],
) -> None:
    """Has the engines do each part, one after the other; those that a learner needs last."""

    def do(name: str, modes: Iterable[str]) -> None:
        for mode in modes:
            with part(f"{mode}: {name}", failures):
                answer = children[mode].do(name)
                failures.update(answer.pop("failures", {}))
                if name == "speed":
                    found[name].setdefault(mode, []).append(answer)
                else:
                    found[name][mode] = answer
                write()

    for mode, child in list(children.items()):
        with part(f"{mode}: start", failures):
            try:
                child.answer(START_LIMIT_S)
            except RuntimeError:
                del children[mode]
                child.close()
                raise
            if "check" in found:
                do("check", [mode])
    learners = [mode for mode in children if mode in LEARNERS]
    if "products" in found:
        do("products", learners)
    for _ in range(TURNS if "speed" in found else 0):
        # Eager modes are for looking at kernels, and slow.
        do("speed", [mode for mode in children if not mode.startswith("eager")])
    # A learner's pass needs the memory.
    for mode in set(children) - set(learners):
        children[mode].close()
    for mode in learners:
        if "learn" in found:
            do("learn", [mode])
        children[mode].close()


if __name__ == "__main__":
    sys.exit(main())
