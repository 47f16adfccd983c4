"""Trains a run again from its journal.

torchrun starts each rank as `python -m slipstream.learner.trainer.replay --config FILE`. The replay
is a plain loop over the recorded batches, without a controller or rollout servers. On a CPU every
version must get the digest that is in the journal.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.core.configuration.config_file import check_model, load_config
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.errors import USAGE_ERROR, ConfigError, SlipstreamError
from slipstream.core.machine.process import leave
from slipstream.core.run_folder import JOURNAL
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.functions import used_functions
from slipstream.learner.controller.records.batch_files import StoredBatch
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import read_batch, read_records
from slipstream.v1 import trainer_pb2

logger = logging.getLogger(__name__)

FAILED = 3


@dataclass(frozen=True)
class RecordedStep:
    """One step of the journal; `digest` is None if the run ended during the step."""

    header: trainer_pb2.BatchHeader
    batch: StoredBatch
    digest: str | None


def recorded_steps(journal: Path) -> Iterator[RecordedStep]:
    """Yields the steps of a journal in order; raises ProtocolError if the journal is damaged."""
    records = list(read_records(journal))
    digests = {
        record["step"]: str(record["digest"]) for record in records if record["kind"] == "step"
    }
    # Batches that were set aside are not among them.
    for batch in read_history(records).batches.values():
        stored = read_batch(journal, batch.step, batch.crc32, batch.attempt)
        # Whatever is missing is told before the first step is trained.
        header = stored.header
        yield RecordedStep(header, stored, digests.get(batch.step))


def check_functions(config: Config, journal: Path) -> None:
    """Raises ConfigError if any start of the run recorded other functions of the user."""
    here = source_digests(config.algorithm)
    used = used_functions(config.model_copy(update={"sources": here}))
    for record in read_records(journal):
        had = record.get("functions") or {}
        if record["kind"] == "start" and had != used:
            assert isinstance(had, dict)
            others = {name for name in had | used if had.get(name) != used.get(name)}
            raise ConfigError(
                "the run cannot be replayed: source or arguments of these functions are others "
                f"than recorded: {', '.join(sorted(others))}"
            )


def main() -> int:
    """Replays a run; returns 1 if a digest differs from the recorded one on a CPU, else 0.

    It returns 2 if the run cannot be replayed, and 3 if a step failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.toml of the run folder")
    parser.add_argument("--step", type=int, help="the last step")
    parser.add_argument("overrides", nargs="*", help="settings that replace those of the file")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_model(config)
        journal = arguments.config.parent / JOURNAL
        check_functions(config, journal)
        steps = list(recorded_steps(journal))
        if arguments.step is not None:
            if not 1 <= arguments.step <= len(steps):
                raise ConfigError(f"--step must be 1 to {len(steps)}, got {arguments.step}")
            steps = steps[: arguments.step]
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    try:
        return replay(config, steps)
    except Exception as error:
        logger.exception("the replay failed")
        print(f"slipstream: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # Python would end with 1, which means that a digest differs, and wait for other ranks.
        os._exit(FAILED)


def replay(config: Config, steps: list[RecordedStep]) -> int:
    """Trains the steps again; rank 0 prints each digest and compares it with the recorded one.

    Returns 1 on rank 0 if a digest differs on a CPU, else 0: sums on a GPU have no fixed order.
    """
    from slipstream.learner.trainer.batches.batch_stream import read_stored
    from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.opening import load_start, open_policy
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.passes import Passes
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.publish import open_published

    policy = open_policy(config, Launch.from_environment())
    training = TrainingStep(policy, config, step_parts(config, policy))
    saved = Checkpointer(config, policy.ranks, stored_policy(policy))
    passes = Passes(policy, saved.load, partial(load_start, policy, config))
    published = open_published(policy, config)
    different = 0
    for recorded in steps:
        batch = read_stored(recorded.batch, training.share)
        step = training if batch.given is None else passes
        step.run(batch)
        digest = published.digests().identity.hex()
        if not policy.ranks.is_main:
            continue
        same = digest == recorded.digest
        different += not same and recorded.digest is not None
        verdict = "as recorded" if same else f"recorded {recorded.digest or 'nowhere'}"
        print(f"version {batch.step + 1}  {digest}  {verdict}", flush=True)
    policy.ranks.close()
    is_exact = policy.ranks.device.type != "cuda"
    cause = "as they may on a GPU, whose sums have no fixed order"
    if is_exact:
        cause = (
            "by other packages, parallel sizes or settings: all steps have those of the last start"
        )
    if different:
        # The command shows lines that begin with this word.
        print(f"version digests that differ: {different}, {cause}", flush=True)
    return int(different > 0 and is_exact)


if __name__ == "__main__":
    leave(main())
