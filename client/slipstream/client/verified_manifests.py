"""Compares folders of a run with manifests that grow with their files, and tells what has none."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client.findings import Findings
from slipstream.client.run_folder import lines_of, parsed
from slipstream.client.verified_files import CHECKPOINT_MANIFEST, is_leftover
from slipstream.core import run_folder
from slipstream.core.machine.files import open_regular
from slipstream.core.run_folder import FILE_DIGEST_BYTES, GROWING_MANIFEST

_BLOCK_BYTES = 1 << 20
# Number of a file's bytes, and their digest in hexadecimal.
_Facts: TypeAlias = tuple[int, str]
_FactsByName: TypeAlias = dict[str, _Facts]
# Folders of the run, whose files lie in folders of their own.
_PARENTS = (run_folder.CHECKPOINTS, run_folder.EXPORTS)
# A folder with one of these files names the others there.
_MANIFESTS = (CHECKPOINT_MANIFEST, run_folder.EXPORT_MANIFEST, GROWING_MANIFEST)
_READ = (run_folder.CONFIG, run_folder.SUMMARY, *run_folder.RESULT_FILES)


def check_growing_manifests(folder: Path, findings: Findings) -> None:
    """Compares the files of each folder below `folder` that has such a manifest with its lines."""
    for path in sorted(folder.glob(f"*/{GROWING_MANIFEST}")):
        what = f"{path.parent.name}/{GROWING_MANIFEST}"
        with findings.reading(what):
            facts, before = _facts_in(path, findings, what)
            unmade = next(reversed(facts), "")
            summary = folder / run_folder.SUMMARY
            if summary.is_file():
                # Only a kill comes between a line and its change.
                before = {}
                unmade = ""
            _compare(
                path.parent,
                facts,
                before,
                unmade,
                findings,
            )


def _facts_in(
    path: Path,
    findings: Findings,
    what: str,
) -> tuple[_FactsByName, _FactsByName]:
    """Returns the facts of files, and those before the last change, which a kill may prevent."""
    facts: _FactsByName = {}
    before: _FactsByName = {}
    with open_regular(path) as file:
        for number, line in enumerate(lines_of(file), start=1):
            if not line.endswith(b"\n"):
                findings.losses.append(f"the last line of {what} was cut off")
                break
            change: Any = parsed(line)
            if not isinstance(change, dict):
                findings.add(f"{what}: line {number} is damaged")
                continue
            before = {}
            removed = change.get("removed", ())
            for name in removed:
                if name in facts:
                    before[name] = facts.pop(name)
            if removed:
                continue
            name = change["path"]
            if name in facts:
                before[name] = facts[name]
            num_bytes = change["num_bytes"]
            digest = change["digest"]
            facts[name] = (num_bytes, digest)
    return facts, before


def _compare(
    folder: Path,
    facts: _FactsByName,
    before: _FactsByName,
    unmade: str,
    findings: Findings,
) -> None:
    """Makes faults of files; facts of `before` may still hold, and `unmade` may be missing."""
    names = set(facts)
    for path in folder.iterdir():
        names.add(path.name)
    names.discard(GROWING_MANIFEST)
    for name in sorted(names):
        what = f"{folder.name}/{name}"
        with findings.reading(what):
            present = _present(folder, name)
            may_be_earlier = name in before
            is_earlier = may_be_earlier and present == before[name]
            if is_earlier or present == facts.get(name):
                continue
            if name.startswith("."):
                findings.losses.append(f"{what} is what a kill has left of a file")
            elif present is None:
                findings.wrong(f"{what} is missing", unless=name == unmade)
            elif name not in facts:
                findings.add(f"{what} is a file that {GROWING_MANIFEST} does not name")
            else:
                findings.same(f"bytes and digest of {what}", present, facts[name])


def _present(folder: Path, name: str) -> _Facts | None:
    if Path(name).name != name:
        return None
    digest = hashlib.blake2b(digest_size=FILE_DIGEST_BYTES)
    num_bytes = 0
    try:
        with open_regular(folder / name) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                num_bytes += len(block)
    except FileNotFoundError:
        return None
    return num_bytes, digest.hexdigest()


def unchecked_files(folder: Path, is_batch_checked: Callable[[str], bool]) -> list[str]:
    """Returns the files of a run's folder, or their folders with numbers, that no check reads.

    `is_batch_checked` takes the name of a file of a batch.
    """
    numbers: Counter[str] = Counter()
    for path in _files_below(folder, Path(), is_batch_checked):
        numbers[_place_of(path)] += 1
    places: list[str] = []
    for place, count in sorted(numbers.items()):
        noun = "file" if count == 1 else "files"
        is_folder = place.endswith("/")
        places.append(f"{place} ({count} {noun})" if is_folder else place)
    return places


def _place_of(path: Path) -> str:
    """Returns the file, or with a slash the folder, by which a reader looks for what is there."""
    has_folders = path.parts[0] in (*_PARENTS, run_folder.JOURNAL)
    depth = 2 if has_folders else 1
    place = "/".join(path.parts[:depth])
    return place if place == str(path) else f"{place}/"


def _files_below(
    folder: Path, place: Path, is_batch_checked: Callable[[str], bool]
) -> Iterator[Path]:
    """Yields the files at `place` below a run's folder that no check reads, none behind links."""
    batches = Path(run_folder.JOURNAL, run_folder.BATCHES)
    with os.scandir(folder / place) as entries:
        for entry in entries:
            path = place / entry.name
            if entry.is_dir(follow_symlinks=False):
                if not _has_manifest(folder, path):
                    yield from _files_below(folder, path, is_batch_checked)
                continue
            is_read = str(path) in _READ or _is_log(path)
            is_batch = place == batches and is_batch_checked(entry.name)
            if not (is_read or is_batch):
                yield path


def _is_log(path: Path) -> bool:
    is_in_journal = path.parent == Path(run_folder.JOURNAL)
    return is_in_journal and path.name.startswith("journal") and path.suffix == ".log"


def _has_manifest(folder: Path, path: Path) -> bool:
    """Whether the checks of manifests read all files of a folder."""
    if is_leftover(path.name):
        return False
    is_top = len(path.parts) == 1
    is_below_parent = len(path.parts) == 2 and path.parts[0] in _PARENTS
    if not (is_top or is_below_parent):
        return False
    for name in _MANIFESTS:
        manifest = folder / path / name
        if manifest.is_file():
            return True
    return False
