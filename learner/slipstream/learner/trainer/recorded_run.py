"""The steps of a run as its folder has them, and the checkpoints from which they can be trained."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.configuration.config_file import check_model, load_config
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.errors import CheckpointError, ConfigError
from slipstream.core.recorded_metrics import recorded_metrics
from slipstream.core.run_folder import CHECKPOINTS, JOURNAL
from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import ProfileSection
from slipstream.learner.algorithms.functions import used_functions
from slipstream.learner.controller.records.batch_files import StoredBatch
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import read_batch, read_records
from slipstream.protocol.checkpoints import (
    checkpoint_path,
    complete_steps,
    read_manifest,
)
from slipstream.v1 import trainer_pb2

logger = logging.getLogger(__name__)

# Exit code of a program whose step failed: Python's own, 1, would say that it found a difference.
FAILED = 3


@dataclass(frozen=True)
class RecordedStep:
    """One step of the journal; `digest` is None if the run ended during the step."""

    header: trainer_pb2.BatchHeader
    batch: StoredBatch
    digest: str | None


def recorded_steps(journal: Path, *, behind: int = 0) -> Iterator[RecordedStep]:
    """Yields the steps of a journal that lead on from version `behind`, in order.

    Batches that were set aside are not among them. Raises ProtocolError if the journal is damaged,
    or a batch is missing.
    """
    records = list(read_records(journal))
    digests = _digests(records)
    history = read_history(records)
    for batch in history.batches.values():
        if batch.step < behind:
            continue
        stored = read_batch(
            journal,
            batch.step,
            batch.crc32,
            batch.attempt,
        )
        # The header is read now, so that a caller learns of a damaged file before it trains.
        header = stored.header
        digest = digests.get(batch.step + 1)
        yield RecordedStep(header, stored, digest)


def _digests(records: Iterable[Mapping[str, JsonValue]]) -> dict[int, str]:
    """Returns the digests of the weights in hexadecimal, by version."""
    digests: dict[int, str] = {}
    for record in records:
        if record["kind"] == "step":
            version = int(str(record["step"])) + 1
            digests[version] = str(record["digest"])
    return digests


def check_functions(config: Config, journal: Path) -> None:
    """Raises ConfigError if any start of the run recorded other functions of the user."""
    sources = source_digests(config.algorithm.own_functions.values())
    present = used_functions(config.model_copy(update={"sources": sources}))
    for record in read_records(journal):
        recorded = record.get("functions") or {}
        if record["kind"] != "start" or recorded == present:
            continue
        assert isinstance(recorded, dict)
        names = recorded.keys() | present.keys()
        changed = sorted(name for name in names if recorded.get(name) != present.get(name))
        raise ConfigError(
            "the run cannot be replayed: source or arguments of these functions are others "
            f"than recorded: {', '.join(changed)}"
        )


@dataclass(frozen=True)
class RecordedRun:
    """Steps of a run that are trained again, one behind the other, from version `start`."""

    folder: Path
    # The version of a checkpoint, or 0 for the weights with which the run began.
    start: int
    steps: list[RecordedStep]
    # The recorded metrics of each step by its number, which counts from 1.
    metrics: Mapping[int, Mapping[str, float]]

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints of the versions that the steps made, by version."""
        digests: dict[int, str] = {}
        for step in self.steps:
            if step.digest is not None:
                digests[step.header.step + 1] = step.digest
        return own_checkpoints(self.folder, digests)


def own_checkpoints(folder: Path, digests: Mapping[int, str]) -> dict[int, Path]:
    """Returns the paths of a run's whole checkpoints with these digests, both by version."""
    paths: dict[int, Path] = {}
    checkpoints = folder / CHECKPOINTS
    for version in complete_steps(checkpoints):
        path = checkpoint_path(checkpoints, version)
        # A checkpoint with a damaged manifest is no place to begin.
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.weight_digest == digests.get(version):
                paths[version] = path
    return paths


def read_run(folder: Path, *, first: int | None, last: int | None) -> RecordedRun:
    """Returns the steps up to `last` that are needed to train step `first` and those behind it.

    Without `first` they begin with the first step, without `last` they end with the last one. With
    `first` they begin behind the newest checkpoint before it that has a digest of the journal's,
    or with the first step. Raises ConfigError for a step that is not recorded, ProtocolError for a
    damaged journal or a missing batch.
    """
    journal = folder / JOURNAL
    start = 0
    if first is not None:
        digests = _digests(read_records(journal))
        versions = own_checkpoints(folder, digests)
        earlier = [version for version in versions if version < first]
        start = max(earlier, default=0)
    steps = list(recorded_steps(journal, behind=start))
    newest = start + len(steps)
    limits = {"--from": first, "--to": last}
    for option, step in limits.items():
        if step is not None and not 1 <= step <= newest:
            raise ConfigError(f"{option} must be 1 to {newest}, got {step}")
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--from must be at most --to, got {first} and {last}")
    if last is not None:
        steps = steps[: last - start]
    return RecordedRun(
        folder=folder,
        start=start,
        steps=steps,
        metrics=recorded_metrics(folder),
    )


def load_settings(path: Path, overrides: Sequence[str]) -> Config:
    """Returns the settings `path` of a run's folder, which may lie elsewhere than they say.

    They profile no step: the traces in the folder stay those of the run. Raises ConfigError like
    `load_config`.
    """
    config = load_config(path, overrides)
    folder = path.absolute().parent
    place = {"dir": folder.parent, "name": folder.name}
    changes = {
        "run": config.run.model_copy(update=place),
        "debug": config.debug.model_copy(update={"profile": ProfileSection()}),
    }
    return config.model_copy(update=changes)


def check_replayable(config: Config) -> None:
    """Raises ConfigError unless model and functions of the user are those of the run."""
    check_model(config)
    check_functions(config, config.run_dir / JOURNAL)


def carry_out(program: Callable[[], int]) -> int:
    """Returns what `program` returns; ends the process with `FAILED` if it raises."""
    try:
        return program()
    except Exception as error:
        logger.exception("the replay failed")
        print(f"slipstream: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # Python would wait for other ranks.
        os._exit(FAILED)
