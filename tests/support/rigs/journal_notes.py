"""Records that no run writes, for tests of how a journal keeps what it is given."""

from typing import Any

import msgspec
from slipstream.learner.controller.records.kinds import Record


def note(kind: str, **fields: Any) -> Record:
    record_kind = msgspec.defstruct(
        kind, list(fields), bases=(Record,), tag=kind, frozen=True
    )
    return record_kind(**fields)
