"""The folders of a run's checkpoints: writing, checking and removing them.

`RUN/checkpoints/step-000012` holds the weights of version 12 with everything that the next step
needs. It appears by a rename when it is complete, and never changes; `manifest.json` is its last
file. Folders that a crash left behind end in `.partial`.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from slipstream.core.errors import CheckpointError
from slipstream.core.machine.files import open_regular, read_regular, replace_file, sync_folder
from slipstream.core.run_folder import EXPORT_MANIFEST, rename_aside
from slipstream.core.types import PolicyVersion
from slipstream.protocol.bounds import one_line, shown
from slipstream.protocol.release import unknown_fact

MANIFEST_NAME = "manifest.json"
# The file that says which versions stay, whatever the settings say.
KEPT_NAME = "kept.json"
PARTIAL_SUFFIX = ".partial"
# Stands before it in the name of a folder that another one replaces.
_EARLIER = ".earlier"
_NAME_FORM = re.compile(r"step-(\d{6,})")
DIGEST_BYTES = 16
_READ_BYTES = 8 << 20
# Most characters of the cause in an error about a manifest.
MAX_CAUSE = 200


class _CheckpointRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_CheckpointRecord):
    """One file of a checkpoint."""

    # Relative to the checkpoint's folder.
    path: str
    num_bytes: int
    # BLAKE2b of DIGEST_BYTES, in hexadecimal.
    digest: str


class Layout(_CheckpointRecord):
    """Sizes of the parallel groups that wrote a checkpoint."""

    world_size: int
    tp: int
    pp: int
    vpp: int | None
    cp: int
    ep: int
    etp: int
    distributed_optimizer: bool


class Manifest(_CheckpointRecord):
    """The description of a checkpoint, written last: a folder with a manifest is complete."""

    format: Literal[1] = 1
    incarnation: int
    # Version of the weights, and so the first step that is trained again from the journal.
    step: int
    # Digest of the weights as they travel; see `buckets.weight_digest`.
    weight_digest: str
    # Digest of the settings of the run that wrote the checkpoint.
    config_digest: str
    layout: Layout
    # Names of the models, each with its optimizer if it has one.
    models: tuple[str, ...]
    # Kind of each model's optimizer, by the model's name; manifests of older versions lack it.
    optimizers: dict[str, str] = {}
    # Rank and alpha of each client's adapter, by name.
    adapters: dict[str, tuple[int, float]] = {}
    # Versions of the packages that wrote the files.
    packages: dict[str, str]
    saved_unix_s: float
    files: tuple[FileEntry, ...]

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.step)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the path of version `step`'s checkpoint in the folder of checkpoints."""
    return folder / f"step-{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Returns the versions with a complete checkpoint, ascending."""
    steps = []
    for step, path in _candidates(folder):
        with contextlib.suppress(OSError):
            if (path / MANIFEST_NAME).is_file():
                steps.append(step)
    return sorted(steps)


def passed_over(folder: Path) -> list[Path]:
    """Returns the incomplete checkpoints newer than the newest complete checkpoint, ascending."""
    newest = max(complete_steps(folder), default=-1)
    return [path for step, path in sorted(_candidates(folder)) if step > newest]


def _candidates(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [
        (
            _NAME_FORM.fullmatch(path.name),
            path,
        )
        for path in folder.iterdir()
    ]
    return [(int(match[1]), path) for match, path in matches if match]


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder.

    Raises CheckpointError if it is unreadable, damaged, of another version than the folder, or
    written by another release in a form that is not known here.
    """
    name = _NAME_FORM.fullmatch(path.name)
    try:
        manifest = Manifest.model_validate_json(read_regular(path / MANIFEST_NAME))
    except OSError as error:
        cause = f"cannot be read: {error.strerror}"
    except ValidationError as error:
        first, *_ = errors = error.errors()
        unknown_facts = [
            e for e in errors if e["type"] == "extra_forbidden" or e["loc"] == ("format",)
        ]
        if unknown_facts:
            # Advice to remove the folder would cost its steps.
            place = ".".join(map(str, unknown_facts[0]["loc"]))
            fact = f"{shown(place)} in {MANIFEST_NAME}"
            raise CheckpointError(unknown_fact(str(path), fact)) from None
        place = ".".join(map(str, first["loc"]))
        cause = f"is damaged: {f'{place}: ' if place else ''}{first['msg']}"
    else:
        if name is None or manifest.step == int(name[1]):
            return manifest
        cause = f"says that it is version {manifest.step}"
    raise CheckpointError(
        f"{path} is no whole checkpoint: {MANIFEST_NAME} {one_line(cause, MAX_CAUSE)}; remove that "
        "folder to go on from an older checkpoint"
    )


def check_newest(folder: Path) -> None:
    """Raises CheckpointError if the newest complete checkpoint fails `read_manifest`.

    Also raises CheckpointError if `folder` exists and is not a folder.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: put it back from a copy of the run, or remove it"
        )
    for step in complete_steps(folder)[-1:]:
        read_manifest(checkpoint_path(folder, step))


def describe_file(
    folder: Path, path: str, moved: Callable[[int], None] = lambda num_bytes: None
) -> FileEntry:
    """Fsyncs the file at `path` below `folder`, and returns its size and digest.

    `moved` is called with the number of bytes of each read, which may be short.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    num_bytes = 0
    with open_regular(folder / path, buffering=0) as file:
        os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            digest.update(block)
            num_bytes += len(block)
            moved(len(block))
    return FileEntry(path=path, num_bytes=num_bytes, digest=digest.hexdigest())


def write_export_manifest(
    folder: Path, moved: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Writes `EXPORT_MANIFEST` with size and digest of each file of an exported model.

    Fsyncs the files. `moved` is called as `describe_file` does.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [str(path.relative_to(folder)) for path in paths if path.name != EXPORT_MANIFEST]
    files = [describe_file(folder, name, moved).model_dump() for name in names]
    replace_file(
        folder / EXPORT_MANIFEST,
        json.dumps({"files": files}, indent=2).encode(),
    )


def check_files(
    folder: Path, files: Iterable[FileEntry], moved: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Raises CheckpointError for the first file whose size or digest differs from its entry.

    `moved` is called with the number of bytes of each read.
    """
    for expected in files:
        problem = ""
        try:
            present = describe_file(folder, expected.path, moved)
        except OSError as error:
            problem = error.strerror or "it cannot be read"
        else:
            if present.num_bytes != expected.num_bytes:
                problem = f"it has {present.num_bytes} bytes instead of {expected.num_bytes}"
            elif present.digest != expected.digest:
                problem = "its bytes are not those that were written"
        if problem:
            raise CheckpointError(
                f"{folder} is damaged: {expected.path}: {problem}; remove that folder to go on "
                "from an older checkpoint"
            )


def steps_to_remove(steps: Iterable[int], *, keep_last: int, keep_every: int) -> list[int]:
    """Returns the versions among the complete checkpoints `steps` that must be removed.

    The `keep_last` newest versions, at least one, are kept, and versions divisible by `keep_every`
    unless it is 0.
    """
    ordered = sorted(steps)
    old = ordered[: -max(1, keep_last)]
    return [step for step in old if not (keep_every and step % keep_every == 0)]


def write_kept(folder: Path, until_by_version: Mapping[int, float]) -> None:
    """Writes until when, in seconds since 1970, each version stays whatever the settings say."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / KEPT_NAME, json.dumps(until_by_version).encode())


def _kept(folder: Path) -> set[int]:
    """Returns the versions that stay now by `write_kept`."""
    path = folder / KEPT_NAME
    now_s = time.time()
    until_by_version = json.loads(path.read_bytes()) if path.exists() else {}
    return {int(step) for step, until_s in until_by_version.items() if until_s > now_s}


def _retained(folder: Path) -> list[int]:
    """Returns the complete versions whose stay the settings decide, ascending."""
    return sorted({*complete_steps(folder)} - _kept(folder))


def first_needed_step(folder: Path, *, keep_last: int) -> int:
    """Returns the first step that a resume from one of the `keep_last` newest checkpoints trains.

    It is 0, the start of the run, if there are fewer checkpoints in `folder`.
    """
    steps = _retained(folder)
    return steps[-keep_last] if len(steps) >= keep_last else 0


def publish_and_retain(partial: Path, *, keep_last: int, keep_every: int) -> Path:
    """Renames a complete `.partial` folder to its final name, and returns the new path.

    The folders are fsynced, so that all names survive a crash; one that has the final name already
    is renamed aside. Then removes old checkpoints by `steps_to_remove` but for those of
    `write_kept`. After a crash at any moment the newest published checkpoint is complete.
    """
    for folder_to_sync in (
        *(path for path in partial.rglob("*") if path.is_dir()),
        partial,
    ):
        sync_folder(folder_to_sync)
    path = partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX))
    if os.path.lexists(path):
        # The path is an incomplete checkpoint of that version, which a resume passed over.
        rename_aside(path)
    partial.rename(path)
    folder = path.parent
    sync_folder(folder)
    for step in steps_to_remove(_retained(folder), keep_last=keep_last, keep_every=keep_every):
        remove_checkpoint(folder, step)
    return path


def remove_checkpoint(folder: Path, step: int) -> None:
    """Removes a checkpoint; after a crash it never looks complete."""
    remove_folder(checkpoint_path(folder, step))


def remove_folder(path: Path) -> None:
    """Removes a folder, renamed to `.partial` first: after a crash it never looks complete."""
    doomed = path.with_name(path.name + PARTIAL_SUFFIX)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def folders_left_by(target: Path) -> list[Path]:
    """Returns what a killed writer of the folder `target` has left, which the next one removes."""
    names = (f"{target.name}{PARTIAL_SUFFIX}", f"{target.name}{_EARLIER}{PARTIAL_SUFFIX}")
    paths = [target.with_name(name) for name in names]
    return [path for path in paths if path.exists()]


def replace_folder(partial: Path, target: Path) -> None:
    """Gives the complete folder `partial` the name `target`, in place of an earlier folder.

    After a crash `target` is one of them, and whole, or missing.
    """
    earlier = target.with_name(f"{target.name}{_EARLIER}{PARTIAL_SUFFIX}")
    if earlier.exists():
        shutil.rmtree(earlier)
    if target.exists():
        target.rename(earlier)
    partial.rename(target)
    sync_folder(target.parent)
    if earlier.exists():
        shutil.rmtree(earlier)


def remove_partial(folder: Path) -> list[str]:
    """Removes folders of interrupted saves or removals, and returns their names."""
    if not folder.is_dir():
        return []
    leftovers = sorted(path for path in folder.iterdir() if path.name.endswith(PARTIAL_SUFFIX))
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [path.name for path in leftovers]
