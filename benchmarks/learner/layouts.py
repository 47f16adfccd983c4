"""Trains the same steps in several layouts of ranks, and compares speed and figures with one rank.

Every layout starts from one folder of random weights and gets the same batches, so that its first
step's loss and gradient norm must be those of one rank up to rounding. Megatron's own loop
(`loops.BareLoop`) trains the same batches in the same processes, in turns with ours once both are
warm; speeds are those of two turns each. Layouts run one after another.

    python -m benchmarks.learner.layouts --shape 0.6B --layouts one,dp4,tp2-pp2 --micro-batches 8
    python -m benchmarks.learner.layouts --shape qwen3-moe --layers 8 --layouts one,ep4,tp2-ep2
    python -m benchmarks.learner.layouts --shape 0.6B --layouts one,dp2,pp2 --hosts
    python -m benchmarks.learner.layouts --shape tiny --layouts one,dp2,tp2   # on CPUs

A layout is `one`, or parts such as tp2, pp2, cp2, ep4, dp4 joined by dashes; dp is what is left of
the product of the others, with ep inside dp. With `--hosts` NCCL takes each rank for a host of its
own, and sends through sockets. Prints one table and writes
benchmarks/results/layouts-SHAPE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from slipstream.core.machine.address import free_port
from slipstream.learner.trainer.batches.batch import Batch

from benchmarks.agreement.family_shapes import FAMILIES, make_family
from benchmarks.common import measure
from benchmarks.common.shapes import SHAPES, make_shape
from benchmarks.learner.loops import (
    LOADS,
    BareLoop,
    Load,
    lognormal_batch,
    packed_as_ours,
    shape_config,
    synchronize,
)

PART = re.compile(r"(tp|pp|cp|ep|dp)(\d+)")


@dataclass(frozen=True)
class Found:
    """What one layout did; lists have a value for each step."""

    tokens_per_s: float
    bare_tokens_per_s: float
    losses: list[float]
    grad_norms: list[float]
    entropies: list[float]
    forward_backward_s: list[float]
    optimizer_s: list[float]
    peak_gib: float


def sizes_of(layout: str) -> tuple[int, dict[str, int]]:
    """Returns the number of ranks and `learner.parallel`; raises ValueError for another name."""
    if layout == "one":
        return 1, {}
    parts = [PART.fullmatch(part) for part in layout.split("-")]
    if None in parts:
        raise ValueError(f"a layout has parts such as tp2, pp2, cp2, ep2 or dp2, got {layout!r}")
    sizes = {part[1]: int(part[2]) for part in parts if part is not None}
    replicas = max(sizes.pop("dp", 1), sizes.get("ep", 1))
    return replicas * math.prod(sizes.get(name, 1) for name in ("tp", "pp", "cp")), sizes


def run_rank(arguments: argparse.Namespace) -> None:
    """What each rank does; rank 0 writes what was found to `arguments.found`."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    world_size, parallel = sizes_of(arguments.rank_of)
    load = load_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.shape if arguments.shape in SHAPES else "tiny"
        config = shape_config(name, load, Path(folder), threads=arguments.threads)
    table = config.model_dump()
    table["model"]["path"] = str(arguments.model)
    learner = {"world_size": world_size, "parallel": parallel}
    table["learner"] |= learner | json.loads(arguments.learner)
    config = config.model_validate(table)
    policy = open_policy(config, Launch.from_environment())
    training = TrainingStep(policy, config)
    device = policy.ranks.device
    vocab = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    batches = [lognormal_batch(load, vocab, step) for step in range(arguments.steps)]
    metrics = [training.run(batch).metrics for batch in batches]
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    bare = BareLoop(policy)
    packed = {batch.step: packed_as_ours(policy, config, batch) for batch in batches}
    loops = (training.run, lambda batch: bare.step(packed[batch.step]))
    turns = [[seconds_of(loop, batches, device) for loop in loops] for _ in range(3)]
    num_tokens = sum(
        len(one.token_ids) for batch in batches[len(batches) // 2 :] for one in batch.trajectories
    )
    ours, peer = (2 * num_tokens / sum(each) for each in zip(*turns[1:], strict=True))
    names = ("loss", "grad_norm", "entropy", "forward_backward_s", "optimizer_s")
    columns = ([step[key] for step in metrics] for key in names)
    if policy.ranks.is_main:
        arguments.found.write_text(json.dumps(asdict(Found(ours, peer, *columns, peak))))
    policy.ranks.close()


def seconds_of(run: Callable[[Batch], object], batches: list[Batch], device: torch.device) -> float:
    """Runs the last half of the batches; returns the seconds."""
    synchronize(device)
    began = time.perf_counter()
    for batch in batches[len(batches) // 2 :]:
        run(batch)
    synchronize(device)
    return time.perf_counter() - began


def load_of(arguments: argparse.Namespace) -> Load:
    load = LOADS.get(arguments.shape, LOADS["0.6B"])
    chosen = {"layers": arguments.layers, "micro_batches": arguments.micro_batches}
    chosen |= {"micro_batch_tokens": arguments.micro_tokens}
    return dataclasses.replace(load, **{name: value for name, value in chosen.items() if value})


def run_layout(layout: str, arguments: argparse.Namespace, model: Path) -> Found | str:
    """Runs all ranks of `layout`; returns what was found, or the error of a rank."""
    world_size, _ = sizes_of(layout)
    found = model.parent / f"{layout}.json"
    command = [*measure.program("learner.layouts"), *sys.argv[1:], "--model", str(model)]
    command += ["--rank-of", layout, "--found", str(found)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    logs = [model.parent / f"{layout}-{rank}.log" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
        if arguments.hosts:
            place |= {"NCCL_HOSTID": rank, "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1}
        variables = os.environ | address | {name: str(value) for name, value in place.items()}
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
            )
    deadline_s = time.monotonic() + arguments.limit_s
    try:
        codes = [rank.wait(max(1.0, deadline_s - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"not done after {arguments.limit_s:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        failed = logs[next(rank for rank, code in enumerate(codes) if code)].read_text()
        measure.progress(failed[-3000:])
        return next((line for line in reversed(failed.split("\n")) if "Error" in line), "failed")
    return Found(**json.loads(found.read_text()))


def rows(found: dict[str, Found | str]) -> list[list[object]]:
    """Returns the table's rows; differences are from the first layout."""
    first = next(iter(found.values()))
    lines: list[list[object]] = []
    for layout, one in found.items():
        if isinstance(one, str) or isinstance(first, str):
            lines.append([layout, *[""] * 7, one if isinstance(one, str) else "no first layout"])
            continue
        speed = f"{one.tokens_per_s:,.0f}", f"{one.tokens_per_s / first.tokens_per_s:.2f}"
        beside = f"{one.tokens_per_s / one.bare_tokens_per_s:.3f}"
        away = max(abs(a - b) for a, b in zip(one.losses, first.losses, strict=True))
        start = f"{one.losses[0]:.8f}", f"{one.grad_norms[0]:.6f}"
        lines.append([layout, *speed, beside, *start, f"{away:.1e}", f"{one.peak_gib:.1f}", ""])
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=(*LOADS, *FAMILIES), default="0.6B")
    parser.add_argument("--layouts", default="one,dp2,tp2,pp2,cp2")
    parser.add_argument("--layers", type=int, default=0, help="of the shape's model")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--micro-tokens", type=int, default=0, help="of a micro batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learner", default="{}", help="more of the table, as JSON")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one layout")
    parser.add_argument("--hosts", action="store_true", help="each rank is a host of its own")
    parser.add_argument("--out", type=Path)
    # These are for the ranks that this program starts.
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for layout in arguments.layouts.split(","):
        try:
            sizes_of(layout)
        except ValueError as error:
            parser.error(str(error))
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.rank_of:
        run_rank(arguments)
        return 0
    found: dict[str, Found | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        on_gpu = torch.cuda.is_available()
        layers = load_of(arguments).layers
        if arguments.shape in SHAPES:
            dtype = "bfloat16" if on_gpu else "float32"
            make_shape(model, arguments.shape, dtype=dtype, max_positions=40960, layers=layers)
        else:
            values = {"max_position_embeddings": 40960}
            made = {"tiny": not on_gpu, "layers": arguments.layers, "values": values}
            make_family(model, arguments.shape, **made)
        for layout in arguments.layouts.split(","):
            found[layout] = run_layout(layout, arguments, model)
            measure.progress(f"{layout}: {found[layout]}")
            header = ["layout", "tokens/s", "of the first", "of the bare loop"]
            header += ["loss, step 1", "grad norm, step 1", "largest loss difference"]
            header += ["peak GiB of rank 0", ""]
            table = measure.table(header, rows(found))
            kept = {
                name: one if isinstance(one, str) else asdict(one) for name, one in found.items()
            }
            record = {"settings": measure.settings_of(arguments), "table": table, "found": kept}
            measure.write_result(f"layouts-{arguments.shape}", record, arguments.out)
    print("\n".join(table))
    return int(any(isinstance(one, str) for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
