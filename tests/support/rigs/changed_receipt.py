"""Changes what is in a receipt, as somebody would who wants it to say something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from slipstream.learner.controller.receipt import unpack, write_receipt
from slipstream.protocol.checkpoints import describe_file

from support.rigs.fuzz_files import journal_bytes

LOG = "journal/journal.log"


def changed_receipt(
    receipt: Path, folder: Path, change: Callable[[Path], object], *, relist: bool
) -> Path:
    """Returns the receipt after `change` of its files, with their new digests if `relist`."""
    files = folder / "files"
    files.mkdir(parents=True)
    listed = unpack(receipt, files)
    change(files)
    if relist:
        entries = tuple(describe_file(files, entry.path) for entry in listed.files)
        listed = listed.model_copy(update={"files": entries})
    write_receipt(folder / "changed", listed, {e.path: files / e.path for e in listed.files})
    return folder / "changed"


def in_json(name: str, old: str, new: str) -> Callable[[Path], object]:
    """Writes `new` in the place of `old`, which is there once."""

    def change(files: Path) -> None:
        text = (files / name).read_text()
        assert text.count(old) == 1
        (files / name).write_text(text.replace(old, new))

    return change


def in_journal(change: Callable[[list[dict]], object]) -> Callable[[Path], object]:
    """Changes the records of the journal, whose lines and checksums are right afterwards."""

    def changed(files: Path) -> None:
        records = [json.loads(line[9:]) for line in (files / LOG).read_text().splitlines()]
        for record in records:
            del record["line"]
        change(records)
        (files / LOG).write_bytes(journal_bytes(records))

    return changed
