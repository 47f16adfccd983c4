"""Packs a run into a receipt, or checks a receipt; `slipstream receipt` starts this program.

The checks need no model. They show that the files are unchanged, that the journal is complete, and
that each version follows from the version before by a batch within the staleness bound. They also
show that the ledger's counts agree and that the rewards in the metrics are the rewards of the
trained trajectories. Only a replay shows that the digests match the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import DONE, FAILED, USAGE_ERROR, ProtocolError, SlipstreamError
from slipstream.core.machine.description import describe_machine, describe_packages
from slipstream.core.run_folder import CONFIG, JOURNAL, METRICS, SUMMARY
from slipstream.core.settings.config import Config
from slipstream.learner.controller.receipt import Receipt, describe_model, pack, unpack
from slipstream.learner.controller.records.history import (
    RunHistory,
    TrajectoryEnd,
    batch_name,
    read_history,
)
from slipstream.learner.controller.records.journal import read_batch, read_records
from slipstream.learner.controller.records.ledger import FATES
from slipstream.learner.controller.trajectories.batch import FormedBatch, from_record
from slipstream.protocol.bounds import one_line

Record = Mapping[str, Any]
# Largest number of characters of a line that is shown.
MAX_LINE = 1000


@dataclass
class Story:
    """The records of a run, read from its unpacked receipt."""

    receipt: Receipt
    folder: Path
    config: Config
    records: Sequence[Record]
    history: RunHistory
    summary: dict[str, Any]
    # The mean reward of each step's batch.
    rewards: dict[int, float] = field(default_factory=dict)
    # Sampled tokens in all trained batches.
    tokens: int = 0
    lags: Counter[int] = field(default_factory=Counter)

    @classmethod
    def read(cls, receipt: Receipt, folder: Path) -> Story:
        """Reads the unpacked files; raises SlipstreamError if a file is damaged."""
        records = list(read_records(folder / JOURNAL))
        summary = _table(SUMMARY, (folder / SUMMARY).read_text())
        config = load_config(folder / CONFIG)
        return cls(receipt, folder, config, records, read_history(records), summary)


def main() -> int:
    """Packs the run if `--out` is given, then checks the receipt.

    Returns 0 if the receipt is right, 1 if a check fails, 2 if packing fails.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the folder of a run, or a receipt")
    parser.add_argument("--out", type=Path, help="the receipt of the folder")
    arguments = parser.parse_args()
    try:
        if arguments.out is not None:
            pack(arguments.path, arguments.out)
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return check(arguments.out or arguments.path)


def check(path: Path) -> int:
    """Prints the result of each check of the receipt `path`.

    Returns 1 at the first check that fails, or 0 if all pass.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-receipt-") as unpacked:
        folder = Path(unpacked)
        try:
            receipt = unpack(path, folder)
            size = sum(entry.num_bytes for entry in receipt.files)
            _say("receipt", f"{receipt.digest} of run {receipt.run}")
            _say("files", f"{len(receipt.files)}, {size:,} bytes, all as listed")
            story = Story.read(receipt, folder)
            for name, told in CHECKS.items():
                for line in told(story):
                    _say(name, line)
        except (SlipstreamError, OSError, ValueError, RecursionError) as error:
            cause = one_line(str(error).replace(f"{folder}/", ""), MAX_LINE)
            print(f"slipstream: {cause}", file=sys.stderr)
            return FAILED
    return DONE


def _journal(story: Story) -> Iterator[str]:
    starts = story.history.starts
    yield f"whole: {len(story.records):,} records, {starts} start{'s' * (starts > 1)}"


def _versions(story: Story) -> Iterator[str]:
    """Checks that the journal has each version and its batch; fills in numbers of `story`."""
    history, newest = story.history, story.summary.get("weight_digest")
    incarnation = 0
    recorded = {record["step"]: record for record in story.records if record["kind"] == "step"}
    groups = {record["step"]: record for record in story.records if record["kind"] == "batch"}
    for step in range(len(history.steps)):
        made = history.steps.get(step)
        if made is None:
            raise ProtocolError(f"version {step + 1} is not in the journal, later ones are")
        if made.version.step != step + 1 or made.version.incarnation < incarnation:
            raise ProtocolError(f"step {step + 1} made version {made.version}: none that follows")
        incarnation = made.version.incarnation
        batch = _batch(story, step)
        if {group.group_id for group in batch.groups} != {*groups[step]["groups"]}:
            raise ProtocolError(f"the batch of step {step + 1} has other groups than journaled")
        if batch.token_lags != Counter(dict(recorded[step]["lags"])):
            raise ProtocolError(f"the tokens of step {step + 1} have other lags than journaled")
        story.lags += batch.token_lags
        story.tokens += batch.token_lags.total()
        story.rewards[step + 1] = statistics.fmean(each.reward for each in batch.trajectories)
    last = history.steps[len(history.steps) - 1].digest
    if last != newest:
        raise ProtocolError(f"{SUMMARY} ends with weights {newest}, the journal with {last}")
    yield f"1 to {len(history.steps)}, each from its batch; the last has weights {last}"


def _batch(story: Story, step: int) -> FormedBatch:
    entry = story.history.batches[step]
    message = read_batch(story.folder / JOURNAL, step, entry.crc32, entry.attempt)
    if (message.header.step, message.header.batch_id) != (step, batch_name(step, entry.attempt)):
        raise ProtocolError(f"the batch of step {step + 1} says that it is another one")
    return from_record(message)


def _staleness(story: Story) -> Iterator[str]:
    bound = story.config.algorithm.max_staleness
    worst = max(story.lags, default=0)
    if worst > bound or min(story.lags, default=0) < 0:
        raise ProtocolError(f"tokens were trained {worst} versions late, {bound} are allowed")
    yield f"{story.tokens:,} trained tokens, at most {worst} versions late; {bound} are allowed"


def _ledger(story: Story) -> Iterator[str]:
    """Yields a line on the token ledger in the summary.

    Raises ProtocolError unless the ledger is whole and agrees with journal and batches.
    """
    ledger = story.summary.get("ledger")
    names = (*FATES, "difference")
    if not isinstance(ledger, dict) or not all(type(ledger.get(name)) is int for name in names):
        raise ProtocolError(f"{SUMMARY} has no whole ledger")
    ends = {end.value: story.history.ends[end] for end in TrajectoryEnd}
    for name, journaled in {**ends, "trained": story.tokens, "difference": 0}.items():
        if ledger[name] != journaled:
            raise ProtocolError(f"the ledger has {ledger[name]} tokens {name}, not {journaled}")
    if story.history.ends[TrajectoryEnd.TRAINED] != story.tokens:
        raise ProtocolError("the journal has another number of trained tokens than the batches")
    if ledger.get("generated") != sum(ledger[name] for name in names):
        raise ProtocolError(f"the ledger has {ledger.get('generated')} generated tokens: no sum")
    parts = [f"{ledger[name]:,} {name.replace('_', ' ')}" for name in names if ledger[name]]
    yield f"{ledger['generated']:,} generated = {' + '.join(parts)}; difference 0"


def _curve(story: Story) -> Iterator[str]:
    """Compares metrics.jsonl with the rewards of batches and evaluations."""
    rows = _rows(story.folder / METRICS)
    steps = [row["step"] for row in rows if "step" in row]
    if steps != list(story.rewards):
        raise ProtocolError(f"{METRICS} has {len(steps)} steps, not each of {len(story.rewards)}")
    for row in rows:
        if "step" in row and not math.isclose(row["reward_mean"], story.rewards[row["step"]]):
            raise ProtocolError(
                f"{METRICS} has reward {row['reward_mean']} at step {row['step']:.0f}, its batch "
                f"has {story.rewards[row['step']]}"
            )
    held = {each["version"]: each["reward_mean"] for each in story.history.evaluations}
    shown = {row["evaluation_step"]: row.get("reward_heldout") for row in rows if "step" not in row}
    if wrong := [step for step in shown if held.get(step, "none") != shown[step]]:
        raise ProtocolError(
            f"{METRICS} has reward_heldout {shown[wrong[0]]} at version {wrong[0]}, the journal "
            f"{held.get(wrong[0], 'none')}"
        )
    first, last = story.rewards[1], story.rewards[len(story.rewards)]
    yield f"mean reward {first:.3f} at step 1, {last:.3f} at step {len(story.rewards)}"
    if known := [step for step in sorted(held) if held[step] is not None]:
        first, last = known[0], known[-1]
        yield f"held out {held[first]:.3f} at version {first}, {held[last]:.3f} at version {last}"


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = _table(f"{METRICS}, line {number},", line)
        needed = ("step", "reward_mean") if "step" in row else ("evaluation_step",)
        if not all(isinstance(row.get(name), int | float) for name in needed):
            raise ProtocolError(f"{METRICS}, line {number}, is no row")
        rows.append(row)
    return rows


def _table(name: str, text: str) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{name} is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ProtocolError(f"{name} is no table")
    return table


def _here(story: Story, kind: str, now: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
    """Yields the recorded facts of one `kind`, and how they differ from this machine's facts.

    The facts were recorded at the run's newest start; `now` returns this machine's facts.
    """
    told = [record.get(kind) for record in story.records if record["kind"] == "start"][-1]
    if not isinstance(told, dict):
        yield "not recorded: the run is of an earlier version"
        return
    here = now()
    yield ", ".join(f"{name} {_shown(value)}" for name, value in told.items())
    others = [name for name in sorted({*told, *here}) if told.get(name) != here.get(name)]
    yield (
        "here " + ", ".join(f"{name} {_shown(here.get(name))}" for name in others)
        if others
        else "the same here"
    )


def _models(story: Story) -> Iterator[str]:
    for model in story.receipt.models:
        place: Path = getattr(story.config, model.setting.partition(".")[0]).path
        here = describe_model(model.setting, place)
        verdict = "not here" if not here.files else "here it is another one"
        same = here.digest == model.digest
        yield f"{model.setting} {model.name}, digest {model.digest}; {'here' if same else verdict}"
    for name, digest in sorted(story.config.sources.items()):
        yield f"the file of {name}, digest {digest}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value)) or "none"
    return str(value) if value is not None else "not there"


def _say(name: str, text: str) -> None:
    # Strangers may have chosen the names in a receipt.
    print(f"{name:>10}  {one_line(text, MAX_LINE)}", flush=True)


# Each check yields its lines, or raises ProtocolError. The order matters: `_versions` counts what
# the later checks compare.
CHECKS: Mapping[str, Callable[[Story], Iterator[str]]] = {
    "journal": _journal,
    "versions": _versions,
    "staleness": _staleness,
    "ledger": _ledger,
    "curve": _curve,
    "packages": partial(_here, kind="packages", now=describe_packages),
    "machine": partial(_here, kind="machine", now=describe_machine),
    "not in it": _models,
}

if __name__ == "__main__":
    sys.exit(main())
