"""The release of Slipstream that this process runs, which parts of a run tell each other.

An upgrade in the middle of a run replaces files under processes that go on: what starts later, such
as a trainer rank after a crash, is of another release than the controller.
"""

import contextlib
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OURS = "slipstream-rl"
# Metadata of every call.
RELEASE_KEY = "slipstream-release"


def source_digest(root: Path) -> str:
    """Returns a digest of the protocol's source, since between releases the version stays."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted((*root.glob("protocol/**/*.py"), *root.glob("v1/*.py"))):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# Read once: the files may be replaced while this process runs.
_PROTOCOL = f"(protocol {source_digest(Path(__file__).parent.parent)})"
_VERSION = "unknown"
with contextlib.suppress(PackageNotFoundError):
    _VERSION = version(OURS)
RELEASE = f"{_VERSION} {_PROTOCOL}"


def unknown_fact(what: str, fact: str) -> str:
    """Returns the line about stored facts of another release, which nobody may pass over."""
    return (
        f"{what} is of another release: {fact} is not known to {OURS} {RELEASE}; go on with the "
        "release that wrote it"
    )


def other_release(shown: str, *, of_worker: bool = False) -> str:
    """Returns the line with which a caller of another release is refused, or "" for ours.

    The interpreter of a worker may have any version of the package: it runs the server's source.
    """
    if shown == RELEASE or (of_worker and shown.endswith(_PROTOCOL)):
        return ""
    return (
        f"the run has {OURS} {RELEASE}, the caller {shown or 'an older one'}: install the same "
        "release on all hosts; after an upgrade stop the run, and the same command resumes it"
    )
