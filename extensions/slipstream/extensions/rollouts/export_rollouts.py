"""Writes the rollouts of a run's trained batches as a data set.

    python -m slipstream.extensions.rollouts.export_rollouts --folder RUN --out FILE

FILE ends in .parquet or .jsonl. Batches are read one record at a time. Prints a line that says what
was written, or the reason why nothing was.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.findings import Findings
from slipstream.client.verify import batch_path, read_batch, read_journal
from slipstream.core.configuration.config_file import load_config
from slipstream.core.configuration.reply_ends import find_reply_ends
from slipstream.core.errors import USAGE_ERROR, ConfigError, ProtocolError, SlipstreamError
from slipstream.core.machine.process import leave
from slipstream.core.run_folder import CONFIG
from slipstream.core.settings.config import Config
from slipstream.core.types import Trajectory
from slipstream.extensions.rollouts.data_set_files import SUFFIXES, open_rows
from slipstream.extensions.rollouts.rows import RowMaker, is_wanted
from slipstream.protocol.codec import trajectory_from_pb
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.v1 import trajectory_pb2

Record: TypeAlias = Mapping[str, Any]

# The keys by which a batch's record names its file.
_OF_BATCH = ("step", "batch_id", "crc32")
# Most causes that are told apart.
_MOST_CAUSES = 100


@dataclass(frozen=True)
class RolloutSelection:
    """Which rollouts are written; steps count from 1."""

    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None

    def has_step(self, step: int) -> bool:
        """Whether the rollouts of a step are asked for."""
        is_early = self.first_step is not None and step < self.first_step
        is_late = self.last_step is not None and step > self.last_step
        return not (is_early or is_late)


def main() -> int:
    """Writes the file; returns 2, with the cause on stderr, if nothing was written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first-step", type=int)
    parser.add_argument("--last-step", type=int)
    parser.add_argument("--min-reward", type=float)
    arguments = parser.parse_args()
    choice = RolloutSelection(arguments.first_step, arguments.last_step, arguments.min_reward)
    try:
        lines = export_rollouts(arguments.folder, arguments.out, choice)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    print("\n".join(lines))
    return 0


def export_rollouts(folder: Path, out: Path, choice: RolloutSelection) -> list[str]:
    """Writes the rollouts of the chosen trained steps of a run; returns lines that say what.

    Raises ConfigError, with nothing written, for a suffix that is none of `SUFFIXES`, a file that
    is there, no chosen step, a batch that is missing or damaged, or steps of a client's own loop.
    """
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"rollouts are written as .parquet or .jsonl, got {out}")
    if out.exists():
        raise ConfigError(f"{out} exists already: remove it, or name another file")
    config = load_config(folder / CONFIG)
    if config.controller.client_loop:
        raise ConfigError(f"{folder} has no rollouts of its own: a client ordered its passes")
    batches = chosen_batches(folder, choice)
    check_batches_are_there(folder, batches)
    maker = RowMaker(config, opened_renderer(config))
    counts: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    with open_rows(out) as write:
        for step, record in batches.items():
            for trajectory in trajectories(folder, step, record):
                for row in maker.rows(step, trajectory):
                    if not is_wanted(row, choice.min_reward):
                        counts["below"] += 1
                        continue
                    write(row)
                    counts["written"] += 1
                    cause = row["unreadable"]
                    if cause and (cause in causes or len(causes) < _MOST_CAUSES):
                        causes[cause] += 1
                    counts["unreadable"] += bool(cause)
        steps = f"steps {min(batches)} to {max(batches)}"
        if not counts["written"]:
            raise ConfigError(
                f"no rollout of {steps} has a reward of {choice.min_reward} or more: choose a "
                "lower --min-reward"
            )
    return list(_lines(out, steps, choice, counts, causes))


def _lines(
    out: Path, steps: str, choice: RolloutSelection, counts: Counter[str], causes: Counter[str]
) -> Iterator[str]:
    below = f"; {counts['below']:,} have less than {choice.min_reward}" if counts["below"] else ""
    yield f"{out} has {counts['written']:,} rollouts of {steps}{below}"
    if counts["unreadable"]:
        cause, _ = causes.most_common(1)[0]
        yield f"{counts['unreadable']:,} of them have no messages, mostly because {cause}"


def chosen_batches(folder: Path, choice: RolloutSelection) -> dict[int, Record]:
    """Returns the journal's records of the batches that were trained, by their steps from 1.

    Steps that are not trained yet are left out. Raises ConfigError for a damaged journal, and if
    no step is left.
    """
    findings = Findings()
    formed: dict[int, Record] = {}
    trained: dict[int, Record] = {}
    num_trained = 0
    for _, _, record in read_journal(folder, findings):
        match record["kind"]:
            case "batch":
                formed[record["step"]] = {key: record[key] for key in _OF_BATCH}
            case "batch_set_aside":
                formed.pop(record["step"], None)
            case "step" if record["step"] in formed:
                batch = formed.pop(record["step"])
                step = record["step"] + 1
                num_trained = max(num_trained, step)
                if choice.has_step(step):
                    trained[step] = batch
    if findings.faults:
        raise ConfigError(f"the journal of {folder} is damaged: {findings.faults[0]}")
    if not num_trained:
        raise ConfigError(f"{folder} has no trained step")
    if not trained:
        raise ConfigError(
            f"--steps names none of the trained steps of {folder}, 1 to {num_trained}"
        )
    return trained


def check_batches_are_there(folder: Path, batches: Mapping[int, Record]) -> None:
    """Raises ConfigError, which names the steps, for batches that were removed."""
    missing = [step for step, record in batches.items() if not batch_path(folder, record).is_file()]
    if not missing:
        return
    hint = "checkpoint.keep_batches = false removes those before a checkpoint"
    if present := sorted(batches.keys() - set(missing)):
        hint += f"; choose --steps {present[0]}:{present[-1]}"
    raise ConfigError(f"{folder} has no batches of steps {ranges(missing)}: {hint}")


def ranges(steps: Sequence[int]) -> str:
    """Returns steps, which are in order, in words: "1 to 4, 7"."""
    present = set(steps)
    first_steps = [step for step in steps if step - 1 not in present]
    last_steps = [step for step in steps if step + 1 not in present]
    return ", ".join(
        str(first) if first == last else f"{first} to {last}"
        for first, last in zip(first_steps, last_steps, strict=True)
    )


def trajectories(folder: Path, step: int, record: Record) -> Iterator[Trajectory]:
    """Yields the trajectories of a batch, one in memory at a time.

    Raises ConfigError if the batch was removed meanwhile, or is damaged.
    """
    try:
        for content in read_batch(folder, record):
            if isinstance(content, trajectory_pb2.Trajectory):
                yield trajectory_from_pb(content)
    except FileNotFoundError:
        check_batches_are_there(folder, {step: record})
        raise
    except (ValueError, ProtocolError) as error:
        raise ConfigError(
            f"the batch of step {step} of {folder} is damaged: {error}; slipstream verify names "
            "all that is"
        ) from error


def opened_renderer(config: Config) -> Renderer:
    """Returns the renderer of the run's rollout servers; raises ConfigError without a tokenizer."""
    settings = config.rollout_server
    try:
        return Renderer(
            config.model.path,
            template=settings.chat_template,
            values=settings.chat_template_kwargs,
            ends=find_reply_ends(config),
        )
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(f"model.path: the tokenizer cannot be read: {cause}") from error


if __name__ == "__main__":
    leave(main())
