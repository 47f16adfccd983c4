r"""Measures what a checkpoint costs training, and other programs that sync files on the same disk.

A trainer of one rank saves again and again, and trains while one of its threads writes:

- *stop*: the time in which training waits until the tensors are copied. The peer is Megatron-Core's
  own asynchronous save of the same state, until its copy is made too (the later fork of its writer
  is not counted). The limit is one copy of as many bytes from the device to memory that is pinned
  already; on a CPU from memory to memory;
- *written*: the time until the files are on the disk, with their digests, and the folder has its
  name;
- *steps*, and *syncs* of another small file every 20 ms, as of the controller's journal, while a
  checkpoint is written and while none is.

    python -m benchmarks.learner.checkpoint
    python -m benchmarks.learner.checkpoint --shape 0.6B
    python -m benchmarks.learner.checkpoint --shape 0.6B --distributed-optimizer

Prints one table and writes benchmarks/results/checkpoint-SHAPE.json, or
checkpoint-SHAPE-distributed.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from slipstream.core.machine.address import free_port
from slipstream.core.types import PolicyVersion

from benchmarks.common.measure import Spread, note, progress, settings_of, table, write_result
from benchmarks.common.shapes import SHAPES
from benchmarks.learner.loops import LOADS, lognormal_batch, shape_config, synchronize

if TYPE_CHECKING:
    from slipstream.learner.trainer.checkpoints.stored_model import StoredModel

SYNC_PERIOD_S = 0.02
# Steps that are timed before the first save.
STEPS = 4

Row = dict[str, float]


def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
    from slipstream.learner.trainer.checkpoints.stored_model import POLICY, StoredModel
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    load = LOADS[arguments.shape]
    config = shape_config(arguments.shape, load, folder / "model", threads=arguments.threads)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder}),
            "learner": config.learner.model_copy(
                update={"ddp": {"use_distributed_optimizer": arguments.distributed_optimizer}}
            ),
        }
    )
    policy = open_policy(config, Launch(0, 1, 0), load_weights=False)
    device = policy.ranks.device
    training = TrainingStep(policy, config)
    models = [StoredModel(POLICY, policy.chunks, policy.optimizer)]
    checkpointer = Checkpointer(config, policy.ranks, models)
    # This allocates the memory for the copy, as at the beginning of a run.
    checkpointer.load_newest()
    batch = lognormal_batch(load, SHAPES[arguments.shape].vocab, 0)

    def step_s() -> float:
        started_s = time.monotonic()
        training.run(batch)
        synchronize(device)
        return time.monotonic() - started_s

    step_s()
    with journal(folder / "journal") as syncs:
        alone = Spread.of([step_s() for _ in range(STEPS)])
        waits = Spread.of(syncs)
        progress(f"a step takes {alone.median:.3f} s, a sync {1000 * waits.median:.2f} ms")
        rows = []
        for repeat in range(arguments.repeats):
            synchronize(device)
            syncs.clear()
            started_s = time.monotonic()
            checkpointer.save(PolicyVersion(0, repeat + 1), b"")
            row = {"stop_s": time.monotonic() - started_s, "step_alone_s": alone.median}
            beside = []
            while (saved := checkpointer.poll()) is None:
                beside.append(step_s())
            row |= {
                "written_s": saved.wall_s,
                "bytes": float(saved.manifest.num_bytes),
                "step_beside_s": max(beside, default=0.0),
                "steps_beside": float(len(beside)),
                "sync_alone_s": waits.median,
                "sync_beside_s": Spread.of(syncs).median,
                "sync_longest_s": max(syncs),
                "peer_s": peer_s(models, folder / "peer", device),
                "limit_s": limit_s(saved.manifest.num_bytes, device),
            }
            rows.append(row)
            note("checkpoint", {"repeat": repeat, **row})
            progress(f"repeat {repeat + 1}: { {k: round(v, 4) for k, v in row.items()} }")
    policy.ranks.close()
    return rows


@contextmanager
def journal(path: Path) -> Iterator[list[float]]:
    """Appends to a file and syncs it, from a thread, until the block ends; yields the seconds.

    Of each sync the list gets them; whoever has read them may clear it.
    """
    waits_s = list[float]()
    closed = threading.Event()

    def run() -> None:
        with path.open("ab", buffering=0) as file:
            while not closed.wait(SYNC_PERIOD_S):
                file.write(b"x" * 100)
                started_s = time.monotonic()
                os.fsync(file.fileno())
                waits_s.append(time.monotonic() - started_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits_s
    finally:
        closed.set()
        thread.join()


def peer_s(models: list[StoredModel], folder: Path, device: torch.device) -> float:
    """Returns the seconds until Megatron-Core's own asynchronous save has its copy."""
    from megatron.core import dist_checkpointing

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    synchronize(device)
    started_s = time.monotonic()
    request: Any = dist_checkpointing.save(
        # Its other strategy is a package of its own.
        stock_states(models),
        str(folder),
        async_sharded_save=True,
        async_strategy="mcore",
    )
    if request.preload_fn is not None:
        request.preload_fn()
    synchronize(device)
    return time.monotonic() - started_s


def stock_states(models: list[StoredModel]) -> dict[str, Any]:
    """Returns the state that Megatron-Core by itself saves of a model and its optimizer."""
    from slipstream.learner.trainer.model.model import unwrapped

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    (model,) = models
    assert model.optimizer is not None
    state = {"model": unwrapped(model.chunks[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = model.optimizer.sharded_state_dict(state["model"], metadata=metadata)
    return state


def limit_s(num_bytes: int, device: torch.device) -> float:
    """Returns the seconds of one copy of `num_bytes` bytes."""
    piece = min(num_bytes, 1 << 30)
    source = torch.zeros(piece, dtype=torch.uint8, device=device)
    target = torch.empty(piece, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target.zero_()
    synchronize(device)
    started_s = time.monotonic()
    for start in range(0, num_bytes, piece):
        length = min(piece, num_bytes - start)
        target[:length].copy_(source[:length], non_blocking=True)
    synchronize(device)
    return time.monotonic() - started_s


def summary(rows: list[Row]) -> list[str]:
    """Returns the table; the first save, which allocates its memory, has its own line."""
    later = rows[1:] or rows

    def cell(name: str, scale: float = 1.0) -> str:
        return Spread.of([row[name] for row in later]).text(2, scale)

    lines: list[list[object]] = [
        ["stop, first save, s", f"{rows[0]['stop_s']:.2f}"],
        ["stop, later saves, s", cell("stop_s")],
        ["stop, Megatron-Core's own save, s", cell("peer_s")],
        ["limit: one copy, s", cell("limit_s")],
        ["bytes, GB", cell("bytes", 1e-9)],
        ["written after, s", cell("written_s")],
        ["a step alone, s", cell("step_alone_s")],
        ["the longest step beside the write, s", cell("step_beside_s")],
        ["a sync alone, ms", cell("sync_alone_s", 1000)],
        ["a sync beside the write, ms", cell("sync_beside_s", 1000)],
        ["the longest sync beside the write, ms", cell("sync_longest_s", 1000)],
    ]
    return table(["checkpoint", "median (min-max)"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(LOADS), default="tiny")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: of temporary files"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        rows = measure(arguments, Path(name))
    spreads = {key: asdict(Spread.of([row[key] for row in rows])) for key in rows[0]}
    record = {"settings": settings_of(arguments), "results": rows, "spreads": spreads}
    lines = summary(rows)
    kind = "-distributed" if arguments.distributed_optimizer else ""
    write_result(f"checkpoint-{arguments.shape}{kind}", {**record, "table": lines}, arguments.out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
