"""The names under which a server at an address has our versions of the weights."""

import secrets

from slipstream.core.types import PolicyVersion
from slipstream.rollout_server.engine_interface import EngineDied


class Stamps:
    """Names of versions that no other process gives: of the run, with a mark of this process.

    Stamps("math").of(PolicyVersion(0, 7))  # "math-5f0c62a9d1e84b37:0:7"
    """

    def __init__(self, run_name: str) -> None:
        self.mark = f"{run_name}-{secrets.token_hex(8)}"

    @property
    def unserved(self) -> str:
        """The name of weights that must not be served."""
        return f"{self.mark}:none"

    def of(self, version: PolicyVersion) -> str:
        return f"{self.mark}:{version.incarnation}:{version.step}"

    def version(self, stamp: object) -> PolicyVersion:
        """Returns the version of a stamp that a reply carries.

        Raises EngineDied for any that this process did not give: the engine was started again, or
        has another master.
        """
        mark, _, version = str(stamp).partition(":")
        incarnation, _, step = version.partition(":")
        if mark != self.mark or not (incarnation.isdecimal() and step.isdecimal()):
            raise EngineDied(foreign(stamp, self.mark))
        return PolicyVersion(int(incarnation), int(step))


def foreign(stamp: object, expected: str) -> str:
    """Returns the sentence about a version that is not `expected`."""
    return (
        f"the engine at the address has the weight version {str(stamp)[:200]!r} and not "
        f"{expected!r}: it was started again, or another program gave it weights"
    )
