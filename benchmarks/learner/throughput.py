"""Compares a training step with Megatron's own loop and with the device's matrix products.

Ours is `TrainingStep.run` on a batch of trajectories: checks, advantages, planning, packing,
log-probabilities, entropies, the objective and its statistics, optimizer. The peer, `bare`, is a
loop as in Megatron's own examples, on the same parameters, schedule and optimizer. It trains a
plain cross-entropy from `labels` on micro batches that we packed beforehand, in turns with ours.

    python -m slipstream.learner.trainer.tiny_model models/tiny
    python -m benchmarks.learner.throughput                   # the quickstart's model, on a CPU
    python -m benchmarks.learner.throughput --shape 0.6B      # a random Qwen3-0.6B on a GPU
    python -m benchmarks.learner.throughput --shape 0.6B --own support.fakes.own_grpo:loss
    python -m benchmarks.learner.throughput --shape 8B --layers 6 --fp8 blockwise
    python -m benchmarks.learner.throughput --shape 0.6B --kept-tokens 20 --out FILE
    python -m benchmarks.learner.throughput --shape 1.7B --micro-tokens 4096
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # its 20 layers fill the memory
    python -m benchmarks.learner.throughput --shape 8B --steps 1

Prints one table and writes benchmarks/results/learner-SHAPE.json; the name ends in -LAYERS where
they are chosen, in -mTOKENS with micro batches of other sizes, in the recipe of FP8, and in -model
with logits in the model's own type.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from slipstream.core.configuration.config_file import load_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from slipstream.learner.trainer.step_cost import Arithmetic

from benchmarks.common import measure
from benchmarks.common.shapes import SHAPES
from benchmarks.learner.loops import (
    LOADS,
    BareLoop,
    Load,
    lognormal_batch,
    matmul_tflops,
    packed_as_ours,
    quickstart_batch,
    shape_config,
    synchronize,
    with_kept_tokens,
)

OURS = "slipstream"
OWN = "own loss"
# Ours, on the same batches with a record of the tokens that each token was drawn from.
REPLAYED = "replayed sampling"
PEER = "bare"
WARMUP_STEPS = {"cpu": 10, "cuda": 3}
# The share of the peer's tokens per second that ours is to reach.
TARGETS = {"quickstart": 0.87, "tiny": 0.87, "0.6B": 0.92, "1.7B": 0.92, "8B": 0.92}


@dataclass(frozen=True)
class Turn:
    """Some steps of one loop, one after another."""

    wall_ms: float
    cpu_ms: float
    tokens_per_s: float
    tflops: float
    # Speed of the device's matrix products, measured right before the turn.
    matmul_tflops: float
    # Most memory of the device in use during the turn; 0 on a CPU.
    peak_gib: float


@dataclass(frozen=True)
class Work:
    """One step of any loop."""

    batch: Batch
    # The same batch with kept tokens, if they are asked for.
    cut_batch: Batch | None
    micro_batches: list[MicroBatch]
    num_tokens: int
    # FLOPs by name of the loop: ours skips the logits of untrained positions, the peer has all.
    flops: dict[str, float]


def works_of(
    config: Config,
    batches: list[Batch],
    training: object,
    *,
    num_kept_tokens: int,
) -> list[Work]:
    """Returns the steps of all loops, packed for the peers as ours packs them, on the device."""
    from slipstream.learner.trainer.step import TrainingStep

    assert isinstance(training, TrainingStep)
    policy = training.policy
    sizes = json.loads((config.model.path / "config.json").read_text())
    works: list[Work] = []
    for batch in batches:
        packed = packed_as_ours(policy, config, batch)
        lengths = [len(trajectory.token_ids) for trajectory in batch.trajectories]
        flops = Arithmetic.of(sizes).training_flops(lengths)
        num_trained = sum(int(micro_batch.loss_mask.sum()) for micro_batch in packed)
        untrained = sum(lengths) - num_trained
        skipped = 6.0 * sizes["hidden_size"] * sizes["vocab_size"] * untrained
        cut_batch = None
        if num_kept_tokens:
            cut_batch = with_kept_tokens(batch, num_kept_tokens, sizes["vocab_size"])
        work = Work(
            batch=batch,
            cut_batch=cut_batch,
            micro_batches=packed,
            num_tokens=sum(lengths),
            flops={OURS: flops - skipped, PEER: flops},
        )
        works.append(work)
    return works


def run_turns(
    config: Config,
    make_batch: Callable[[int], Batch],
    arguments: argparse.Namespace,
) -> dict[str, list[Turn]]:
    """Returns the turns of all loops, after some steps of each that are not counted."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    has_weights = arguments.shape == "quickstart"
    policy = open_policy(config, Launch(0, 1, 0), load_weights=has_weights)
    device = policy.ranks.device
    measure.progress(f"model on {device}")
    training = TrainingStep(policy, config)
    bare = BareLoop(policy)
    batches = [make_batch(step) for step in range(arguments.steps)]
    works = works_of(config, batches, training, num_kept_tokens=arguments.kept_tokens)
    for work in works:
        sizes = [len(micro_batch.token_ids) for micro_batch in work.micro_batches]
        trained = sum(int(micro_batch.loss_mask.sum()) for micro_batch in work.micro_batches)
        measure.progress(f"micro batches of {sizes} tokens, {trained} of them trained")
    loops: dict[str, Callable[[Work], object]] = {OURS: lambda work: training.run(work.batch)}
    if arguments.own:
        algorithm = {
            "algorithm": config.algorithm.model_dump() | {"loss": arguments.own, "loss_args": {}}
        }
        own_config = config.model_validate(config.model_dump() | algorithm)
        own_training = TrainingStep(policy, own_config)
        loops[OWN] = lambda work: own_training.run(work.batch)
    if arguments.kept_tokens:
        cut = {"top_p": 0.95, "top_k": arguments.kept_tokens}
        cut_sampling = {"sampling": config.sampling.model_dump() | cut}
        cut_config = config.model_validate(config.model_dump() | cut_sampling)
        cut_training = TrainingStep(policy, cut_config)
        loops[REPLAYED] = lambda work: cut_training.run(work.cut_batch)
    loops[PEER] = lambda work: bare.step(work.micro_batches)
    turns_by_loop: dict[str, list[Turn]] = {name: [] for name in loops}
    uncounted = math.ceil(WARMUP_STEPS[device.type] / len(works))
    for repeat in range(-uncounted, arguments.repeats):
        for name, loop in loops.items():
            turn = take_turn(loop, PEER if name == PEER else OURS, works, device)
            what = "warm-up" if repeat < 0 else f"repeat {repeat + 1}"
            measure.progress(f"{what} {name}: {turn.tokens_per_s:,.0f} tokens/s")
            if repeat >= 0:
                turns_by_loop[name].append(turn)
                row = {"shape": arguments.shape, "repeat": repeat, "loop": name, **asdict(turn)}
                measure.note("learner", row)
    policy.ranks.close()
    return turns_by_loop


def take_turn(
    run: Callable[[Work], object], kind: str, works: Sequence[Work], device: torch.device
) -> Turn:
    """Runs each of `works` once; returns the figures of this turn of a loop of a `kind`."""
    gc.collect()
    rate = matmul_tflops(device)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    for work in works:
        run(work)
    synchronize(device)
    wall_s = time.perf_counter() - wall_s
    cpu_s = time.process_time() - cpu_s
    return Turn(
        wall_ms=1000 * wall_s / len(works),
        cpu_ms=1000 * cpu_s / len(works),
        tokens_per_s=sum(work.num_tokens for work in works) / wall_s,
        tflops=sum(work.flops[kind] for work in works) / wall_s / 1e12,
        matmul_tflops=rate,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else 0.0,
    )


def rows(turns_by_loop: dict[str, list[Turn]], target: float) -> list[list[object]]:
    """Returns the table's rows: medians over the turns, as shares of the peer and the limit."""

    def spread(name: str, field: str) -> measure.Spread:
        return measure.Spread.of([getattr(turn, field) for turn in turns_by_loop[name]])

    limit = measure.Spread.of(
        [turn.matmul_tflops for turns in turns_by_loop.values() for turn in turns]
    )
    peer = spread(PEER, "tokens_per_s").median
    lines: list[list[object]] = []
    for name in turns_by_loop:
        speed = spread(name, "tokens_per_s")
        rate = spread(name, "tflops").median
        lines.append(
            [
                name,
                spread(name, "wall_ms").text(1),
                f"{spread(name, 'cpu_ms').median:.1f}",
                f"{speed.median:,.0f}",
                f"{speed.median / peer:.3f}",
                f"{rate:.3g}",
                f"{rate / limit.median:.3f}",
                f"{spread(name, 'peak_gib').median:.1f}",
            ]
        )
    lines.append(["limit: matrix product", "", "", "", "", limit.text(1), "1.000", ""])
    return [*lines, ["target", "", "", "", f"{target:.2f}", "", "", ""]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("quickstart", *LOADS), default="quickstart")
    parser.add_argument("--layers", type=int, help="of the shape's model; default: see LOADS")
    parser.add_argument(
        "--micro-tokens", type=int, help="of a micro batch; a step keeps its tokens"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--model", type=Path, default=measure.ROOT / "models/tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, help="of each loop in one turn; default: 40, on a GPU 2"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--kept-tokens",
        type=int,
        default=0,
        help="tokens that each token was drawn from, for a loop that replays sampling",
    )
    parser.add_argument(
        "--fp8",
        choices=("off", "blockwise", "tensorwise"),
        default="off",
        help="learner.fp8, for both loops",
    )
    parser.add_argument("--own", help="a second loss, module:function")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        # The variable must be set before any library asks for a device.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU")
    arguments.steps = arguments.steps or (2 if torch.cuda.is_available() else 40)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape == "quickstart":
            settings = [f'model.path="{arguments.model}"', f"learner.threads={arguments.threads}"]
            config = load_config(measure.ROOT / "deploy/configs/quickstart.toml", settings)
            make_batch = functools.partial(quickstart_batch, config)
        else:
            load = LOADS[arguments.shape]
            load = dataclasses.replace(load, layers=arguments.layers or load.layers)
            if arguments.micro_tokens:
                number = load.micro_batches * load.micro_batch_tokens // arguments.micro_tokens
                load = dataclasses.replace(
                    load, micro_batch_tokens=arguments.micro_tokens, micro_batches=number
                )
            config = shape_config(
                arguments.shape,
                load,
                Path(folder),
                threads=arguments.threads,
                fp8=arguments.fp8,
            )
            make_batch = functools.partial(lognormal_batch, load, SHAPES[arguments.shape].vocab)
        turns_by_loop = run_turns(config, make_batch, arguments)
    turns = {
        loop: [asdict(turn) for turn in loop_turns] for loop, loop_turns in turns_by_loop.items()
    }
    header = ["loop", "ms/step (min-max)", "CPU ms/step", "tokens/s", "of the peer"]
    header += ["TFLOP/s", "of the limit", "peak GiB"]
    table = measure.table(header, rows(turns_by_loop, TARGETS[arguments.shape]))
    record = {"settings": measure.settings_of(arguments), "table": table, "turns": turns}
    from slipstream.learner.trainer.layers.attention import chosen_attention

    record["attention"] = chosen_attention()
    is_usual = arguments.layers in (None, LOADS.get(arguments.shape, Load(0)).layers)
    suffix = "" if is_usual else f"-{arguments.layers}"
    suffix += f"-m{arguments.micro_tokens}" if arguments.micro_tokens else ""
    suffix += "" if arguments.fp8 == "off" else f"-{arguments.fp8}"
    measure.write_result(f"learner-{arguments.shape}{suffix}", record, arguments.out)
    print("\n".join([*table, f"attention: {record['attention']}"]))


if __name__ == "__main__":
    main()
