"""Trains in layouts and compares them with one rank, on whatever this machine has.

`PYTHONPATH=tests python -m support.rigs.parity_run --world 2 --layouts tp2-sp,cp2 --out DIR`: with
one GPU for each rank on nccl and TransformerEngine, without GPUs on gloo. Prints a line for each
layout; exit code 1 when one differs by more than the tolerance.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from support.fakes.parity_models import make_models
from support.ranks import parity_ranks
from support.ranks.parity_layouts import LAYOUTS, layouts_of
from support.ranks.rank_pool import RankPool

# Sums in another order, and in half precision roundings at other places.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
# Relative where they are larger than 1, else absolute.
COMPARED = ("loss", "grad_norm", "entropy", "kl")
# Settings that leave the loss at a bound: rounding decides about a sequence that is as good as on
# it.
MASKED = ("masked_sequence_fraction", "masked_token_fraction")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--world", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--layouts", help="names with commas between; default: all that can run"
    )
    parser.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32")
    parser.add_argument(
        "--tolerance", type=float, help="of losses, norms and log-probabilities"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for models and results"
    )
    arguments = parser.parse_args()
    names = arguments.layouts.split(",") if arguments.layouts else None
    pool = RankPool()
    try:
        comparison = compare(
            pool, arguments.out, arguments.world, arguments.dtype, names
        )
    finally:
        pool.close()
    tolerance = arguments.tolerance or TOLERANCES[arguments.dtype]
    for name, difference in comparison.items():
        print(
            f"{name:45} {difference:.1e}{'' if difference <= tolerance else '  TOO LARGE'}"
        )
    return (
        0 if all(difference <= tolerance for difference in comparison.values()) else 1
    )


def runnable(world_size: int, dtype: str) -> list[str]:
    """The layouts of `world_size` ranks that this machine can run in this precision."""
    has_cuda = torch.cuda.is_available()
    return [
        name
        for name in layouts_of(world_size)
        if not (has_cuda and LAYOUTS[name].is_slow_network)
        # TransformerEngine splits sequences in half precision only.
        and not (
            has_cuda and dtype == "float32" and LAYOUTS[name].parallel.get("cp", 1) > 1
        )
    ]


def compare(
    pool: RankPool,
    folder: Path,
    world_size: int,
    dtype: str,
    names: Sequence[str] | None = None,
) -> dict[str, float]:
    """The largest difference of each layout to the layout of one rank that does the same."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "llama").exists():
        make_models(folder)
    names = names or runnable(world_size, dtype)
    references = {LAYOUTS[name].reference for name in names}
    expected = run(pool, folder, 1, dtype, sorted(references))
    ours = run(pool, folder, world_size, dtype, names) if world_size > 1 else expected
    return {
        name: difference(ours[name], expected[LAYOUTS[name].reference], dtype)
        for name in names
        if name in ours
    }


def run(
    pool: RankPool, folder: Path, world_size: int, dtype: str, names: Sequence[str]
) -> dict[str, dict]:
    """What the ranks of some layouts found."""
    jobs = {name: name if dtype == "float32" else f"{name}@{dtype}" for name in names}
    program = Path(parity_ranks.__file__)
    pool.run(
        program, list(jobs.values()), world_size=world_size, folder=folder, limit_s=1800
    )
    return {
        name: torch.load(folder / f"{job}.pt", weights_only=True)
        for name, job in jobs.items()
    }


def difference(found: dict, expected: dict, dtype: str) -> float:
    """Infinite when not even the loaded weights are the same.

    Steps count up to the first in which other tokens are masked: float32 shows whether that is
    right, half precision rounds a sequence across its bound.
    """
    if found["digest"] != expected["digest"]:
        return float("inf")
    steps = list(zip(found["metrics"], expected["metrics"], strict=True))
    alike = itertools.takewhile(
        lambda two: all(two[0].get(k) == two[1].get(k) for k in MASKED), steps
    )
    compared = list(alike) if dtype != "float32" else steps
    if not compared:
        return float("inf")
    values = [
        (ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
        for ours, theirs in compared
        for name in COMPARED
    ]
    values += [
        float((ours - theirs).abs().mean())
        for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True)
    ]
    return max(map(abs, values))


if __name__ == "__main__":
    sys.exit(main())
