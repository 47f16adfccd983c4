"""Restores a run from its journal."""

import itertools
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from slipstream.core.errors import ConfigError, ProtocolError
from slipstream.core.machine.description import describe_machine, describe_packages
from slipstream.core.run_folder import CHECKPOINTS, JOURNAL_LOG, check_journal_not_lost
from slipstream.learner.algorithms.functions import used_functions
from slipstream.learner.controller.events import EventLog
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.part import Part
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import FORMAT, REMEDY, RunHistory, read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    checkpoint_path,
    complete_steps,
    passed_over,
)


def begin(journal: Journal, folder: Path, run: Run) -> RunHistory:
    """Reads the journal in `folder`, adds a record of this start, and returns the state so far.

    The progress of `run` gets id, key and version from the journal. Raises ConfigError if the run
    may not resume here, and ProtocolError if the journal is damaged.
    """
    records = read_records(folder)
    first = next(records, None)
    if first is None:
        check_journal_not_lost(folder.parent)
    elif run.config.run.resume == "never":
        raise ConfigError(f"{folder} holds a run already, and run.resume is never")
    run_id = run.progress.run_id if first is None else str(first.get("run_id", ""))
    if run.config.run.id not in (None, run_id):
        raise ConfigError(f"{folder} holds run {run_id}, and run.id is {run.config.run.id}")
    # All starts of a run share one key, so that trajectories that wait in its queue can be opened.
    key = (str(first.get("key", "")) if first is not None else "") or secrets.token_hex(32)
    start = kinds.Start(
        format=FORMAT,
        run_id=run_id,
        key=key,
        unix_s=time.time(),
        functions={**used_functions(run.config)},
        machine=describe_machine(),
        packages=describe_packages(),
    )
    history = read_history([] if first is None else itertools.chain([first], records))
    history.add(start)
    _check_end(journal, history, folder)
    journal.settled, journal.state = history.settled, history
    journal.append(start)
    journal.sync()
    try:
        run.progress.begin(history.run_id, bytes.fromhex(key), history.version)
    except ValueError:
        raise ProtocolError(f"the journal begins without a key of the run; {REMEDY}") from None
    return history


def _check_end(journal: Journal, history: RunHistory, folder: Path) -> None:
    """Raises ConfigError if the newest checkpoint or batch file is newer than the journal.

    The journal has then lost lines: a crash leaves at most one batch file and no checkpoint without
    a record.
    """
    version, num_batches, newer = history.version.step, history.next_step, ""
    saved = max(complete_steps(folder.parent / CHECKPOINTS), default=0)
    step, attempt = max(journal.kept_batches(), default=(0, 0))
    if saved > version:
        path = checkpoint_path(folder.parent / CHECKPOINTS, saved)
        newer, ends = f"{path} is of version {saved}", f"ends at version {version}"
    elif step > num_batches:
        path = journal.path(step, attempt)
        newer, ends = f"{path} is of step {step + 1}", f"holds {num_batches} batches"
    if newer:
        log = folder / JOURNAL_LOG
        raise ConfigError(f"{newer}, but {log} {ends}: lines at its end are lost; {REMEDY}")


def warn_of_checkpoints(folder: Path, recorded: int, events: EventLog) -> None:
    """Warns about incomplete checkpoints in `folder`, or else about one that is missing.

    An incomplete checkpoint is a folder without a manifest that is newer than the newest complete
    checkpoint. `recorded` is the version of the journal's newest checkpoint.
    """
    newest = max(complete_steps(folder), default=0)
    base = f"a resume begins from version {newest}" if newest else "a resume begins from the start"
    over = passed_over(folder)
    for path in over:
        events.warn(f"{path} is no whole checkpoint, it has no {MANIFEST_NAME}: {base}")
    if not over and recorded > newest:
        events.warn(f"{checkpoint_path(folder, recorded)} is not there any more: {base}")


def restore(
    books: Books, former: BatchFormer, parts: Iterable[Part | Intake], history: RunHistory, run: Run
) -> None:
    """Restores each part, before any server connects, unless this is the first start of the run."""
    if history.starts == 1:
        return
    books.leases.restore(history)
    books.ledger.restore(history)
    former.restore(history)
    for part in parts:
        part.restore(history)
    open_groups = sum(not group.is_complete for group in books.leases.groups.values())
    run.events.add(
        f"the run resumes at version {history.version}; the journal has the batches of "
        f"{history.next_step} steps, and {open_groups} open groups go on"
    )
    newest = history.batches.get(history.version.step)
    if newest is not None:
        run.events.add(f"batch {newest.batch_id} was formed and is not trained yet")
