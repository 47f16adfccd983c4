"""The program of a rank that records a run by the trainer's own step, and replays and bisects it.

A job is JSON: what to do, then its arguments. What `replay` and `bisect` printed lies in
FOLDER/JOB.txt, behind a line with the exit code, where JOB is the last argument.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.run_folder import CONFIG, JOURNAL, METRICS
from slipstream.core.settings.config import Config
from slipstream.core.types import GroupId, PolicyVersion
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.codec import trajectory_to_pb
from slipstream.v1 import trainer_pb2

from support.fakes.fake_controller import batch_order, make_batch

STEPS = 4
NUM_GROUPS = 16
GROUP_SIZE = 4
VOCAB = 32
# The poisoned sample of a run.
POISONED_STEP = 2
POISONED_GROUP = 21
POISONED_MEMBER = 1


def config_of(
    model: Path,
    run: Path,
    algorithm: dict[str, object],
    others: Mapping[str, object],
) -> Config:
    """Settings of a recorded run; `others` have the names of their tables before a dot."""
    settings: dict[str, Any] = {
        "run": {"name": run.name, "steps": STEPS, "dir": str(run.parent)},
        "model": {"path": str(model), "dtype": "float32"},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 24},
        "checkpoint": {"every_steps": 1, "keep_last": STEPS},
        "learner": {"timeout_s": 60.0},
    }
    settings["algorithm"] = {
        "group_size": GROUP_SIZE,
        "groups_per_step": NUM_GROUPS,
        "max_staleness": 1,
        "learning_rate": 1e-3,
        **algorithm,
    }
    for name, value in others.items():
        table, _, key = name.partition(".")
        settings[table][key] = value
    return parse_config(settings, source="test")


def recorded_batch(step: int, *, is_poisoned: bool) -> Batch:
    """The batch of step `step` + 1, whose groups have the names of leases."""
    batch = make_batch(
        step,
        num_groups=NUM_GROUPS,
        group_size=GROUP_SIZE,
        vocab_size=VOCAB,
        max_tokens=24,
    )
    numbers: dict[str, int] = {}
    for name in batch.group_ids:
        numbers.setdefault(name, NUM_GROUPS * step + len(numbers))
    trajectories = []
    for trajectory in batch.trajectories:
        number = numbers[trajectory.group_id]
        logprobs = trajectory.behavior_logprobs
        is_poisoned_sample = (
            is_poisoned
            and number == POISONED_GROUP
            and trajectory.member == POISONED_MEMBER
        )
        if is_poisoned_sample:
            # A server that told nonsense of what it sampled.
            logprobs = np.full_like(logprobs, -12.0)
        renamed = dataclasses.replace(
            trajectory,
            group_id=GroupId(f"g{number:06d}"),
            behavior_logprobs=logprobs,
        )
        trajectories.append(renamed)
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


def record(config: Config, batches: Iterable[Batch]) -> None:
    """Trains batches and leaves what a controller and a trainer would leave of a run in its folder.

    The groups of each batch have the names of leases.
    """
    from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.weight_publisher import open_published

    run = config.run_dir
    policy = open_policy(config, Launch.from_environment())
    training = TrainingStep(policy, config)
    checkpointer = Checkpointer(config, policy.ranks, stored_policy(policy))
    checkpointer.load_newest()
    published = open_published(policy, config)
    (run / CONFIG).write_text(dump_config(config))
    with Journal(run / JOURNAL) as journal, (run / METRICS).open("w") as rows:
        start = kinds.Start(
            format=1,
            run_id="r",
            key="ab" * 32,
            unix_s=1.0,
        )
        journal.append(start)
        num_leases = 0
        for step, batch in enumerate(batches):
            result = training.run(batch)
            digest = published.digests().identity
            version = PolicyVersion(0, step + 1)
            checkpointer.save(version, digest)
            for group in dict.fromkeys(batch.group_ids):
                lease = kinds.GroupLease(
                    group=group,
                    environment="letters",
                    number=num_leases,
                    task=0,
                    seed=0,
                    server="s",
                    epoch=1,
                    deadline=step,
                )
                journal.append(lease)
                num_leases += 1
            order = batch_order(batch)[0]
            message = trainer_pb2.RecordedBatch(
                header=order.batch,
                trajectories=map(trajectory_to_pb, batch.trajectories),
            )
            journal.append(journal.write_batch(message))
            trained = kinds.Step(
                step=step,
                version=(0, step + 1),
                digest=digest.hex(),
                lags=[],
                several=0,
            )
            journal.append(trained)
            row = {"step": step + 1, **result.metrics}
            rows.write(json.dumps(row) + "\n")
    checkpointer.finish()
    policy.ranks.close()


def command(module: str, arguments: list[str], output: Path) -> None:
    """Runs one of the two programs as a rank does, and keeps what it says."""
    from slipstream.learner.trainer import bisect, replay

    programs = {"replay": replay, "bisect": bisect}
    printed = io.StringIO()
    sys.argv = [module, *arguments]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = programs[module].main()
    output.write_text(f"{code}\n{printed.getvalue()}")


def run_rank(folder: Path, job: str) -> None:
    kind, *arguments = json.loads(job)
    if kind == "record":
        name, algorithm, is_poisoned, *others = arguments
        run = folder / name
        run.mkdir()
        batches = [
            recorded_batch(step, is_poisoned=is_poisoned) for step in range(STEPS)
        ]
        config = config_of(folder / "model", run, algorithm, *others or [{}])
        record(config, batches)
        return
    name, options, output = arguments
    config = folder / name / CONFIG
    command(kind, ["--config", str(config), *options], folder / f"{output}.txt")
