"""Measures what a batch costs: the controller's processor, and each trainer rank's with its memory.

PYTHONPATH=tests:deploy python -m benchmarks.controller.batches

The controller is a real one alone, with servers and a trainer that take no time of their own, as in
`load`; its processor seconds are those of a trajectory and of a byte that fit all shapes best. The
ranks are two processes that get a batch from rank 0 over gloo, make its training sequences and keep
both; each trains every second episode. Main memory is what is resident afterwards beyond what was
before. Processor time is the claim: the machine may be busy. Waits for: the controller, and the
ranks. Unblocked by: them.

Prints the tables and writes benchmarks/results/batches.json. The figures of a dry run are rounded
from it (core/slipstream/core/configuration/batch_costs.py), which a test compares.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.machine.address import free_port
from slipstream.core.settings.sections import LearnerSection
from slipstream.core.types import GroupId, Purpose, RoutedExperts, Trajectory
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.trajectories.formed_batch import FormedBatch, chunks
from slipstream.protocol.access.run_token import make_run_token, run_credentials
from slipstream.v1 import trainer_pb2
from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.controller_runs import make_config
from support.rigs.waiting import until

from benchmarks.common.measure import progress, table, write_result
from benchmarks.controller.load import QUEUE_BYTES, LoadServer, LoadTrainer, processor_s

GROUP_SIZE = 16
GROUPS_PER_STEP = 4
MAX_STALENESS = 1
NUM_SERVERS = 4
NUM_EXPERTS = 128
VOCAB = 151_936
NUM_RANKS = 2
SEED = 1


@dataclass(frozen=True)
class Shape:
    """Trajectories of one length; each token has `layers` x `top_k` experts of one byte."""

    name: str
    prompt_tokens: int
    reply_tokens: int
    layers: int = 0
    top_k: int = 8
    # Tokens that each sampled token was drawn from.
    kept_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens

    def write_model(self, folder: Path) -> None:
        """Writes the config.json by which a controller knows how large a trajectory may be."""
        values = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": self.layers,
            "num_experts": NUM_EXPERTS,
            "num_experts_per_tok": self.top_k,
        }
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))

    def routed_experts(self) -> RoutedExperts | None:
        if not self.layers:
            return None
        drawn = np.random.default_rng(SEED).integers(
            NUM_EXPERTS, size=(self.num_tokens, self.layers, self.top_k), dtype=np.uint8
        )
        return RoutedExperts(drawn, NUM_EXPERTS)


SHORT = Shape("576 tokens", 64, 512)
LONG = Shape("4,096 tokens", 64, 4032)
RECORDED = Shape("4,096 tokens, 48 layers of 8 experts", 64, 4032, layers=48)
DEEP = Shape("4,096 tokens, 94 layers of 8 experts", 64, 4032, layers=94)
CUT = Shape("4,096 tokens, 20 kept tokens", 64, 4032, kept_tokens=20)


@dataclass(frozen=True)
class ControllerCost:
    """What trajectories of one shape take of the controller."""

    shape: Shape
    trajectory_bytes: int
    num_trajectories: int
    processor_s: float
    # The most that was resident, of which all that may wait is one part.
    resident_bytes: int

    @property
    def trajectory_s(self) -> float:
        return self.processor_s / self.num_trajectories

    @property
    def waiting_bytes(self) -> int:
        """The most that all leases together may deliver before a step ends."""
        num_waiting = (MAX_STALENESS + 1) * GROUPS_PER_STEP * GROUP_SIZE
        return num_waiting * self.trajectory_bytes


async def controller_cost(shape: Shape, *, seconds: float) -> ControllerCost:
    """Returns what a controller takes while servers deliver as fast as they get leases."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shape.write_model(model)
        config = make_config(
            Path(folder),
            run__steps=10**6,
            model__path=str(model),
            algorithm__router_replay="rollout" if shape.layers else "off",
            algorithm__group_size=GROUP_SIZE,
            algorithm__groups_per_step=GROUPS_PER_STEP,
            algorithm__max_staleness=MAX_STALENESS,
            sampling__max_reply_tokens=shape.reply_tokens,
            sampling__max_episode_tokens=shape.num_tokens,
            queue__max_bytes=QUEUE_BYTES,
            # Batches are written and removed again, as a long run would.
            checkpoint__keep_batches=False,
        )
        config.run_dir.mkdir()
        path = config.run_dir / "config.toml"
        path.write_text(dump_config(config))
        make_run_token(config)
        controller = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slipstream.learner.controller",
            "--config",
            str(path),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        address = config.controller.address
        tokens = (shape.prompt_tokens, shape.reply_tokens)
        servers = [
            LoadServer(address, number, tokens, routed_experts=shape.routed_experts())
            for number in range(NUM_SERVERS)
        ]
        trainer = LoadTrainer(address)
        for peer in (trainer, *servers):
            peer.credentials = run_credentials(config)
        tasks = [asyncio.ensure_future(peer.run()) for peer in (trainer, *servers)]

        def is_over() -> bool:
            return any(map(asyncio.Future.done, tasks))

        try:
            await until(lambda: trainer.version.step >= 2 or is_over())
            assert not is_over(), [task.exception() for task in tasks if task.done()]
            before_s = processor_s(controller.pid)
            before_steps = trainer.version.step
            await asyncio.sleep(seconds)
            assert not is_over(), [task.exception() for task in tasks if task.done()]
            steps = trainer.version.step - before_steps
            assert steps, f"no step of {shape.name} within {seconds:g} s"
            return ControllerCost(
                shape=shape,
                trajectory_bytes=servers[0].template.ByteSize(),
                num_trajectories=steps * GROUPS_PER_STEP * GROUP_SIZE,
                processor_s=processor_s(controller.pid) - before_s,
                resident_bytes=most_resident(controller.pid),
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            controller.kill()
            await controller.wait()


def most_resident(pid: int) -> int:
    """Returns the most bytes that a process has had in main memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def fitted(costs: list[ControllerCost]) -> tuple[float, float]:
    """Returns the seconds of a trajectory and of a byte that fit the costs best, relatively."""
    measured = np.array([cost.trajectory_s for cost in costs])
    rows = np.array([[1.0, cost.trajectory_bytes] for cost in costs])
    trajectory_s, byte_s = np.linalg.lstsq(
        rows / measured[:, None], np.ones(len(costs)), rcond=None
    )[0]
    return float(trajectory_s), float(byte_s)


def made_batch(shape: Shape, *, num_trajectories: int) -> FormedBatch:
    """Returns a batch of groups of `GROUP_SIZE`."""
    drawn = np.random.default_rng(SEED)
    experts = shape.routed_experts()
    groups = []
    for number in range(num_trajectories // GROUP_SIZE):
        group = Group(
            group_id=GroupId(f"g{number}"),
            environment="environment",
            task_index=number,
            seed=0,
            purpose=Purpose.TRAINING,
            size=GROUP_SIZE,
            deadline_step=0,
            holder=None,
        )
        for member in range(GROUP_SIZE):
            group.finished[member] = _trajectory(shape, drawn, number, member, experts)
        groups.append(group)
    return FormedBatch(step=0, batch_id="b000000", groups=tuple(groups))


def _trajectory(
    shape: Shape,
    drawn: np.random.Generator,
    number: int,
    member: int,
    experts: RoutedExperts | None,
) -> Trajectory:
    token_ids = drawn.integers(VOCAB, size=shape.num_tokens)
    kept_tokens = b""
    if shape.kept_tokens:
        # Ids in ascending order, one of each part of the vocabulary.
        width = VOCAB // shape.kept_tokens
        ids = drawn.integers(width, size=(shape.reply_tokens, shape.kept_tokens))
        ids += width * np.arange(shape.kept_tokens)
        token_ids[shape.prompt_tokens :] = ids[:, 0]
        counts = np.full(shape.reply_tokens, shape.kept_tokens, dtype=np.int64)
        kept_tokens = KeptTokens(counts, ids.ravel()).packed()
    return plain_trajectory(
        token_ids,
        (shape.prompt_tokens, shape.reply_tokens),
        group_id=GroupId(f"g{number}"),
        member=member,
        routed_experts=experts,
        kept_tokens=kept_tokens,
        reward=float(member % 2),
    )


@dataclass(frozen=True)
class RankCost:
    """What a batch takes of a trainer rank that trains one episode of `NUM_RANKS`."""

    rank: int
    # The tokens of the whole batch, and its bytes on the wire.
    num_tokens: int
    batch_bytes: int
    # Resident at the end beyond what was resident before.
    kept_bytes: int
    processor_s: float
    wall_s: float


def rank_costs(shape: Shape, *, batch_mb: int) -> list[RankCost]:
    """Returns what a batch of about `batch_mb` takes of each of `NUM_RANKS` processes."""
    largest = made_batch(shape, num_trajectories=GROUP_SIZE)
    group_bytes = sum(chunk.ByteSize() for chunk in chunks(largest))
    num_groups = max(1, round(batch_mb * 1e6 / group_bytes))
    port = free_port("127.0.0.1")
    arguments = [json.dumps(asdict(shape)), str(num_groups * GROUP_SIZE)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.controller.batches", "--as-rank", *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    costs = []
    for rank in ranks:
        output, _ = rank.communicate()
        assert rank.returncode == 0, f"a rank ended with {rank.returncode}"
        costs.append(RankCost(**json.loads(output.splitlines()[-1])))
    return costs


def be_a_rank(shape: Shape, num_trajectories: int) -> None:
    """Takes part in one batch as a trainer's rank does, and prints what it took."""
    # Only ranks import torch and Megatron.
    from slipstream.learner.trainer.batches.batch import Batch, on_every_rank, read_order
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.ranks import compat
    from slipstream.learner.trainer.ranks.parallel import Launch, Ranks

    compat.install()
    ranks = Ranks(Launch.from_environment(), LearnerSection(world_size=NUM_RANKS), seed=0)
    batch_bytes = 0
    messages: list[bytes] = []
    if ranks.is_main:
        formed = made_batch(shape, num_trajectories=num_trajectories)
        messages = [trainer_pb2.Directive(batch=formed.header).SerializeToString()]
        messages += [
            trainer_pb2.Directive(chunk=chunk).SerializeToString() for chunk in chunks(formed)
        ]
        del formed
        batch_bytes = sum(map(len, messages))

    def answer() -> Iterator[trainer_pb2.Directive]:
        # As with gRPC, a message that was read is kept by nobody.
        while messages:
            yield trainer_pb2.Directive.FromString(messages.pop(0))

    def share(batch: Batch) -> frozenset[int]:
        return frozenset(range(ranks.rank, len(batch.lengths), NUM_RANKS))

    process = psutil.Process()
    gc.collect()
    ranks.broadcast_bytes(b"ready" if ranks.is_main else None)
    before_bytes = process.memory_info().rss - batch_bytes
    before_s = time.process_time()
    began_s = time.monotonic()
    batch = read_order(on_every_rank(answer() if ranks.is_main else None, ranks), share)
    assert isinstance(batch, Batch)
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories, step=batch.step, with_experts=bool(shape.layers)
    )
    processor_seconds = time.process_time() - before_s
    wall_s = time.monotonic() - began_s
    gc.collect()
    kept_bytes = process.memory_info().rss - before_bytes
    assert len(sequences) == num_trajectories
    cost = RankCost(
        rank=ranks.rank,
        num_tokens=sum(batch.lengths),
        batch_bytes=batch_bytes,
        kept_bytes=kept_bytes,
        processor_s=processor_seconds,
        wall_s=wall_s,
    )
    print(json.dumps(asdict(cost)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each controller")
    parser.add_argument("--batch-mb", type=int, default=400, help="size of a rank's batch")
    parser.add_argument("--out", type=Path, help="file of the result")
    parser.add_argument("--as-rank", nargs=2, metavar=("SHAPE", "TRAJECTORIES"))
    arguments = parser.parse_args()
    if arguments.as_rank is not None:
        be_a_rank(Shape(**json.loads(arguments.as_rank[0])), int(arguments.as_rank[1]))
        return
    rank_rows = []
    of_ranks: dict[str, dict[str, float]] = {}
    for shape in (LONG, CUT, DEEP):
        costs = rank_costs(shape, batch_mb=arguments.batch_mb)
        progress(f"ranks, {shape.name}: {costs}")
        batch_bytes = costs[0].batch_bytes
        # All ranks of a run wait for the one that takes most.
        of_ranks[shape.name] = {
            "batch_bytes": batch_bytes,
            "num_tokens": costs[0].num_tokens,
            "kept_bytes": max(cost.kept_bytes for cost in costs),
            "processor_s": max(cost.processor_s for cost in costs),
        }
        rank_rows.append(rank_row(shape, **of_ranks[shape.name]))
    of_controller = []
    for shape in (SHORT, LONG, RECORDED, DEEP):
        of_controller.append(asyncio.run(controller_cost(shape, seconds=arguments.seconds)))
        progress(f"controller, {of_controller[-1]}")
    trajectory_s, byte_s = fitted(of_controller)
    record = {
        "table": [
            *table(RANK_HEADS, rank_rows),
            "",
            *table(CONTROLLER_HEADS, [controller_row(cost) for cost in of_controller]),
            "",
            f"All rows of the controller fit {1e3 * trajectory_s:.2f} ms a trajectory and "
            f"{1e9 * byte_s:.2f} s a GB.",
        ],
        "figures": {
            "CONTROLLER_TRAJECTORY_S": trajectory_s,
            "CONTROLLER_BYTE_S": byte_s,
            "CONTROLLER_FURTHER_BATCHES": further_batches(of_controller),
            **rank_figures(of_ranks),
        },
    }
    print("\n".join(record["table"]))
    write_result("batches", record, arguments.out)


RANK_HEADS = ("a batch of", "MB", "bytes kept a token", "of the batch", "processor s a GB")
CONTROLLER_HEADS = (
    "a trajectory of",
    "kB",
    "ms of processor",
    "s a GB",
    "MB resident",
    "MB that may wait",
)


def further_batches(costs: list[ControllerCost]) -> float:
    """Returns how many batches a controller holds beside the trajectories that wait."""
    empty, full = costs[0], costs[-1]
    beside_bytes = full.resident_bytes - empty.resident_bytes - full.waiting_bytes
    return beside_bytes / (GROUPS_PER_STEP * GROUP_SIZE * full.trajectory_bytes)


def rank_figures(of_ranks: dict[str, dict[str, float]]) -> dict[str, float]:
    """Returns what a token, a byte of experts and one of kept tokens take of a rank."""
    plain, cut, deep = (of_ranks[shape.name] for shape in (LONG, CUT, DEEP))
    token_s = plain["processor_s"] / plain["num_tokens"]
    token_bytes = plain["batch_bytes"] / plain["num_tokens"]

    def byte_s(costs: dict[str, float]) -> float:
        more_s = costs["processor_s"] - token_s * costs["num_tokens"]
        return more_s / (costs["batch_bytes"] - token_bytes * costs["num_tokens"])

    return {
        "RANK_BYTES_PER_TOKEN": plain["kept_bytes"] / plain["num_tokens"],
        "RANK_TOKEN_S": token_s,
        "RANK_EXPERTS_BYTE_S": byte_s(deep),
        "RANK_KEPT_BYTE_S": byte_s(cut),
    }


def rank_row(
    shape: Shape, *, batch_bytes: float, num_tokens: float, kept_bytes: float, processor_s: float
) -> list[str]:
    return [
        shape.name,
        f"{batch_bytes / 1e6:,.0f}",
        f"{kept_bytes / num_tokens:,.0f}",
        f"{kept_bytes / batch_bytes:.2f}",
        f"{processor_s / batch_bytes * 1e9:.1f}",
    ]


def controller_row(cost: ControllerCost) -> list[str]:
    return [
        cost.shape.name,
        f"{cost.trajectory_bytes / 1e3:,.1f}",
        f"{1e3 * cost.trajectory_s:.2f}",
        f"{1e9 * cost.trajectory_s / cost.trajectory_bytes:,.1f}",
        f"{cost.resident_bytes / 1e6:,.0f}",
        f"{cost.waiting_bytes / 1e6:,.0f}",
    ]


if __name__ == "__main__":
    main()
