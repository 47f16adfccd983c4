"""Digests by which a reader of an ended run notices that a file has changed since."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.machine.files import open_regular
from slipstream.core.run_folder import (
    CHECKPOINTS,
    EXPORT_MANIFEST,
    EXPORTS,
    FILE_DIGEST_BYTES,
    GROWING_MANIFEST,
    JOURNAL,
    RESULT_FILES,
    journal_logs,
)
from slipstream.protocol.checkpoints import MANIFEST_NAME, PARTIAL_SUFFIX

_BLOCK_BYTES = 1 << 20
# The manifests of files in a run's folder.
_MANIFESTS = (
    f"*/{GROWING_MANIFEST}",
    f"{CHECKPOINTS}/*/{MANIFEST_NAME}",
    f"{CHECKPOINTS}/*/{EXPORT_MANIFEST}",
    f"{EXPORTS}/*/{EXPORT_MANIFEST}",
)


def file_digests(folder: Path, tell: Callable[[str], None]) -> dict[str, JsonValue]:
    """Returns number and digest of the bytes of each result file and log of a run's journal.

    The same of each manifest of files in the run's folder, but for those that a kill has left. It
    reads them all, so it blocks for a second for each GB or so. A file that is missing or
    cannot be read is left out, and told.
    """
    digests: dict[str, JsonValue] = {}
    logs = journal_logs(folder / JOURNAL)
    results = [folder / name for name in RESULT_FILES]
    for path in [*results, *logs, *_manifests(folder)]:
        digest = hashlib.blake2b(digest_size=FILE_DIGEST_BYTES)
        num_bytes = 0
        try:
            with open_regular(path) as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
                    num_bytes += len(block)
        except OSError as error:
            tell(f"{path} cannot be read: {error.strerror}")
            continue
        name = str(path.relative_to(folder))
        digests[name] = [num_bytes, digest.hexdigest()]
    return digests


def _manifests(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for pattern in _MANIFESTS:
        paths.extend(sorted(folder.glob(pattern)))
    return [path for path in paths if not path.parent.name.endswith(PARTIAL_SUFFIX)]


def summary_digest(summary: Mapping[str, JsonValue]) -> str:
    """Returns the digest of a summary that has none yet: of its JSON with sorted keys."""
    content = json.dumps(summary, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=FILE_DIGEST_BYTES).hexdigest()
