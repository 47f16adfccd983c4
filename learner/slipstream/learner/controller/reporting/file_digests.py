"""Digests by which a reader of an ended run notices that a file has changed since."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.machine.files import open_regular
from slipstream.core.run_folder import FILE_DIGEST_BYTES, JOURNAL, RESULT_FILES, journal_logs

_BLOCK_BYTES = 1 << 20


def file_digests(folder: Path, tell: Callable[[str], None]) -> dict[str, JsonValue]:
    """Returns number and digest of the bytes of each result file and log of a run's journal.

    It reads them all, so it blocks for a second for each GB or so. A file that is missing or
    cannot be read is left out, and told.
    """
    digests: dict[str, JsonValue] = {}
    logs = journal_logs(folder / JOURNAL)
    results = [folder / name for name in RESULT_FILES]
    for path in [*results, *logs]:
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


def summary_digest(summary: Mapping[str, JsonValue]) -> str:
    """Returns the digest of a summary that has none yet: of its JSON with sorted keys."""
    content = json.dumps(summary, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=FILE_DIGEST_BYTES).hexdigest()
