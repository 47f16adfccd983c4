"""The address at which agents beyond this host reach the workers of the host, by one port."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass, field
from typing import Self

# The variable by which a worker gets the address; programs of agents do not see it.
VARIABLE = "SLIPSTREAM_AGENTS"
_NUM_MARK_DIGITS = 32


@dataclass(frozen=True)
class HostAddress:
    """The URL of a host's port, and the key by which its workers mark the paths below it.

    A path leads to a port on loopback. Without the mark strangers would reach any port there.
    """

    url: str
    key: bytes = field(repr=False)

    @classmethod
    def taken(cls) -> Self | None:
        """Takes the address out of the variables of this process; None where there is none."""
        text = os.environ.pop(VARIABLE, "")
        if not text:
            return None
        fields = json.loads(text)
        return cls(fields["url"], bytes.fromhex(fields["key"]))

    def variables(self) -> dict[str, str]:
        """Returns the variables of a worker, which may use the address."""
        fields = {"url": self.url, "key": self.key.hex()}
        return {VARIABLE: json.dumps(fields)}

    def new_path(self, port: int) -> str:
        """Returns a new first part of a path, without a slash, that leads to `port`."""
        unmarked = f"{port}-{secrets.token_hex(16)}"
        return f"{unmarked}-{self._mark(unmarked)}"

    def port_of(self, path: str) -> int | None:
        """Returns the port to which the first part of a path leads, or None if none of ours did."""
        unmarked, _, mark = path.rpartition("-")
        if not hmac.compare_digest(mark.encode(), self._mark(unmarked).encode()):
            return None
        return int(unmarked.partition("-")[0])

    def _mark(self, unmarked: str) -> str:
        digest = hmac.new(self.key, unmarked.encode(), hashlib.sha256)
        return digest.hexdigest()[:_NUM_MARK_DIGITS]
