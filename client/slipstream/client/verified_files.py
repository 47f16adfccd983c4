"""Compares the files of checkpoints and of the final model with their manifests."""

import hashlib
from pathlib import Path
from typing import Any

from slipstream.client.findings import Findings
from slipstream.client.run_folder import parsed
from slipstream.client.verified_journal import JournalCheck
from slipstream.core.machine.files import open_regular, read_regular
from slipstream.core.run_folder import (
    CHECKPOINTS,
    EXPORT_MANIFEST,
    EXPORT_VERSION,
    EXPORTS,
)

# Most bytes of a manifest.
MOST_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
# The file that a checkpoint gets last.
CHECKPOINT_MANIFEST = "manifest.json"


def check_files(folder: Path, findings: Findings, journal: JournalCheck) -> None:
    """Reads every file that a manifest below `folder` names, and compares its digest."""
    for path in sorted(folder.glob(f"{CHECKPOINTS}/step-*/{CHECKPOINT_MANIFEST}")):
        name = path.parent.name
        if is_leftover(name):
            continue
        with findings.reading(f"the manifest of {name}"):
            manifest: Any = parsed(
                read_regular(
                    path,
                    most_bytes=MOST_BYTES,
                )
            )
            version = (
                manifest["incarnation"],
                manifest["step"],
            )
            findings.same("a checkpoint", name, f"step-{version[1]:06d}")
            journal.same_weights(
                name,
                version,
                manifest["weight_digest"],
            )
            _check_entries(
                path.parent,
                manifest["files"],
                findings,
            )
            _check_names(
                path.parent,
                manifest["files"],
                findings,
                own_name=path.name,
            )
    for path in sorted(folder.glob(f"{CHECKPOINTS}/step-*")):
        is_whole = (path / CHECKPOINT_MANIFEST).is_file() or is_leftover(path.name)
        findings.wrong(f"{path.name} has no {CHECKPOINT_MANIFEST}", unless=is_whole)
    exports = [
        *folder.glob(f"{CHECKPOINTS}/*/{EXPORT_MANIFEST}"),
        *folder.glob(f"{EXPORTS}/*/{EXPORT_MANIFEST}"),
    ]
    for path in sorted(exports):
        if is_leftover(path.parent.name):
            continue
        with findings.reading(f"the manifest of {path.parent.name}"):
            manifest = parsed(
                read_regular(
                    path,
                    most_bytes=MOST_BYTES,
                )
            )
            _check_entries(
                path.parent,
                manifest["files"],
                findings,
            )
            _check_names(path.parent, manifest["files"], findings)
            _check_version(path.parent, findings, journal)


def is_leftover(name: str) -> bool:
    """Whether a folder is what a kill has left, or was put aside as damaged."""
    return name.endswith(".partial") or ".damaged-" in name


def _check_version(folder: Path, findings: Findings, journal: JournalCheck) -> None:
    """Compares the version that an exported folder names, if it does, with the journal's."""
    path = folder / EXPORT_VERSION
    if not path.is_file():
        return
    described: Any = parsed(read_regular(path, most_bytes=MOST_BYTES))
    version = (described["incarnation"], described["version"])
    name = folder.name.removesuffix("-adapters")
    findings.same("an exported folder", name, f"step-{version[1]:06d}")
    journal.same_weights(folder.name, version, described["weight_digest"])


def _check_names(
    folder: Path,
    entries: list[dict[str, Any]],
    findings: Findings,
    *,
    own_name: str = EXPORT_MANIFEST,
) -> None:
    """Makes a fault of files that a folder's manifest, whose name is `own_name`, does not name."""
    expected = {own_name}
    for entry in entries:
        expected.add(entry["path"])
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        is_known = name in expected or path.is_dir()
        text = f"{folder.name} has a file that its manifest does not name: {name}"
        findings.wrong(text, unless=is_known)


def _check_entries(folder: Path, entries: list[dict[str, Any]], findings: Findings) -> None:
    for entry in entries:
        file = folder / Path(entry["path"])
        is_inside = ".." not in file.parts and file.is_relative_to(folder)
        what = f"{folder.name}/{entry['path']}"
        if not is_inside or not file.is_file():
            findings.same(
                f"bytes of {what}",
                None,
                entry["num_bytes"],
            )
            continue
        num_bytes = file.stat().st_size
        findings.same(
            f"bytes of {what}",
            num_bytes,
            entry["num_bytes"],
        )
        if num_bytes == entry["num_bytes"]:
            findings.same(
                f"the digest of {what}",
                _digest(file),
                entry["digest"],
            )


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
