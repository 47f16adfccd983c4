"""A plain synchronous training loop: `python plain_loop.py CONFIG`, without a controller.

It reads the trajectories that a run recorded, forms batches of its own in the order in which the
groups were leased, trains them one after the other, and prints a line of JSON for each step. With
`--digest FOLDER` it only prints the digest of the weights in a Hugging Face folder.
"""

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path

from slipstream.client.launch.children import rank_environments
from slipstream.core.configuration.config_file import load_config
from slipstream.core.settings.config import Config
from slipstream.core.types import Trajectory
from slipstream.learner.controller.records.batch_files import StoredBatch
from slipstream.learner.controller.records.journal import batch_path, read_records
from slipstream.protocol.codec import trajectory_from_pb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--digest", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    overrides = [f'model.path="{arguments.digest}"'] if arguments.digest else []
    config = load_config(arguments.config, overrides)
    os.environ.update(rank_environments(config, range(1))[0])
    if arguments.digest:
        print_digest(config)
    else:
        train(config)


def recorded_groups(config: Config) -> list[list[Trajectory]]:
    """All trained groups in the order of their leases, each by member."""
    groups = defaultdict(list)
    journal = config.run_dir / "journal"
    for record in read_records(journal):
        if record["kind"] != "batch":
            continue
        path = batch_path(journal, int(record["step"]), 0)
        for message in StoredBatch(path, int(record["crc32"])).trajectories:
            groups[message.group_id].append(trajectory_from_pb(message))
    return [sorted(groups[name], key=lambda t: t.member) for name in sorted(groups)]


def train(config: Config) -> None:
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.weight_stream import open_stream

    groups = recorded_groups(config)
    size = config.algorithm.groups_per_step
    policy = open_policy(config, Launch.from_environment())
    training = TrainingStep(policy, config)
    stream = open_stream(policy, config)
    for step in range(config.run.steps):
        groups_of_step = groups[step * size : (step + 1) * size]
        batch = tuple(trajectory for group in groups_of_step for trajectory in group)
        result = training.run(Batch(step, f"plain-{step}", batch))
        line = {
            "ids": [trajectory.trajectory_id for trajectory in batch],
            "metrics": result.metrics,
            "digest": stream.run().identity.hex(),
        }
        print(json.dumps(line), flush=True)
    policy.ranks.close()


def print_digest(config: Config) -> None:
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.weights.weight_publisher import open_published

    policy = open_policy(config, Launch.from_environment())
    print(
        json.dumps({"digest": open_published(policy, config).digests().identity.hex()})
    )
    policy.ranks.close()


if __name__ == "__main__":
    main()
