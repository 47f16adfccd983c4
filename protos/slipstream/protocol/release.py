"""The release of Slipstream that this process runs, which parts of a run tell each other.

An upgrade in the middle of a run replaces files under processes that go on: what starts later, such
as a trainer rank after a crash, is of another release than the controller.
"""

import hashlib
from pathlib import Path

from slipstream.core.machine.description import installed

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
_VERSION = installed((OURS,)).get(OURS, "unknown")
RELEASE = f"{_VERSION} (protocol {source_digest(Path(__file__).parent.parent)})"


def unknown_fact(what: str, fact: str) -> str:
    """Returns the line about stored facts of another release, which nobody may pass over."""
    return (
        f"{what} is of another release: {fact} is not known to {OURS} {RELEASE}; go on with the "
        "release that wrote it"
    )


def other_release(shown: str) -> str:
    """Returns the line with which a caller of another release is refused, or "" for ours."""
    if shown == RELEASE:
        return ""
    return (
        f"{OURS} {RELEASE} runs here, the caller has {shown or 'an older one'}: install the same "
        "release on all hosts; after an upgrade stop the run, and the same command resumes it"
    )
