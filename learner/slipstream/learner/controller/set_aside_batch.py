"""Records in a run's journal that a batch will not be trained; no controller may run meanwhile.

Command: `python -m slipstream.learner.controller.set_aside_batch RUN STEP [GROUP ...]`. It prints
one line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import USAGE_ERROR, ConfigError, ProtocolError, SlipstreamError
from slipstream.core.run_folder import JOURNAL, JOURNAL_LOG
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.trajectories.formed_batch import SetAside, from_contents

CAUSE = "the user asked for it"


def main() -> int:
    """Sets aside the batch, or the groups, that the command names; returns 0, or 2 on an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("step", type=int, help="from 1, as people read it")
    parser.add_argument("groups", nargs="*", help="default: all of the batch")
    arguments = parser.parse_args()
    try:
        print(set_batch_aside(arguments.run, arguments.step, arguments.groups).describe())
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def set_batch_aside(run: Path, step: int, groups: Sequence[str] = ()) -> SetAside:
    """Journals that the batch of `step` (from 1), or only its `groups`, will not be trained.

    Returns the journaled record. Raises ConfigError if a controller runs, if no batch of `step`
    waits to be trained, or if a group is not in the batch.
    """
    folder = run / JOURNAL
    if not (folder / JOURNAL_LOG).is_file():
        raise ConfigError(f"{run} has no journal")
    with Journal(folder) as journal:
        history = read_history(read_records(folder))
        newest = history.version.step
        if step - 1 in history.steps:
            covered = ", which a checkpoint covers" if step <= history.checkpoint.step else ""
            raise ConfigError(
                f"step {step} of {run} is trained{covered}; only a batch from which no version was "
                f"made can be set aside, and the newest version is {newest}"
            )
        if step - 1 not in history.batches:
            waits = f"only that of step {newest + 1}" if newest in history.batches else "none"
            raise ConfigError(
                f"{run} has no batch of step {step} that waits to be trained, {waits} does"
            )
        batch = from_contents(journal.read_batch(history.batches[step - 1]))
        try:
            set_aside = SetAside.of(batch, groups, CAUSE, by="user")
        except ProtocolError as error:
            raise ConfigError(str(error)) from None
        journal.append(set_aside.record())
    return set_aside


if __name__ == "__main__":
    sys.exit(main())
