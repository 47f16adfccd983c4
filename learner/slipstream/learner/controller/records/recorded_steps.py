"""The batch and the version of each step of a run, some tens of bytes a step.

A run may go on from any of its checkpoints, so that the facts of all steps stay. They lie in
columns, which a start takes from a snapshot as they are.
"""

from array import array
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from slipstream.core.types import PolicyVersion

_DIGEST_BYTES = 16
# Stands in a column for a step that the table lacks.
_NONE = -1


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """The journal's record of the batch of a step."""

    step: int
    batch_id: str
    crc32: int
    # Number of its sampled tokens.
    tokens: int = 0

    @property
    def attempt(self) -> int:
        """Number of earlier batches of the same step that were set aside."""
        return attempt_of(self.batch_id)


@dataclass(frozen=True, slots=True)
class JournaledStep:
    """The version that the trainer made from a batch."""

    version: PolicyVersion
    digest: str


def batch_name(step: int, attempt: int) -> str:
    """Returns the id of a batch of `step` after `attempt` earlier batches were set aside."""
    return f"b{step:06d}-{attempt}" if attempt else f"b{step:06d}"


def attempt_of(batch_id: str) -> int:
    """Returns the attempt in a batch id that `batch_name` made."""
    number = batch_id.partition("-")[2]
    return int(number) if number.isdecimal() else 0


class BatchTable(MutableMapping[int, RecordedBatch]):
    """The batches by their steps."""

    def __init__(self) -> None:
        self._crc32 = array("q")
        self._attempts = array("q")
        self._tokens = array("q")
        # Ids that `batch_name` does not make.
        self._ids: dict[int, str] = {}
        self._num_batches = 0

    def stored(self) -> list[object]:
        """Returns the content as plain values, for `restored`."""
        return [
            self._num_batches,
            self._ids,
            self._crc32.tobytes(),
            self._attempts.tobytes(),
            self._tokens.tobytes(),
        ]

    @classmethod
    def restored(cls, stored: Sequence[Any]) -> Self:
        """Returns the table whose content `stored` returned."""
        table = cls()
        table._num_batches, table._ids, crc32, attempts, tokens = stored
        table._crc32.frombytes(crc32)
        table._attempts.frombytes(attempts)
        table._tokens.frombytes(tokens)
        return table

    def copy(self) -> Self:
        """Returns a table that keeps its content."""
        return self.restored(self.stored())

    def __setitem__(self, step: int, batch: RecordedBatch) -> None:
        num_missing = step + 1 - len(self._crc32)
        for column in (self._crc32, self._attempts, self._tokens):
            column.extend([_NONE] * num_missing)
        self._num_batches += step not in self
        self._ids.pop(step, None)
        if batch.batch_id != batch_name(step, batch.attempt):
            self._ids[step] = batch.batch_id
        self._crc32[step] = batch.crc32
        self._attempts[step] = batch.attempt
        self._tokens[step] = batch.tokens

    def __getitem__(self, step: int) -> RecordedBatch:
        if step not in self:
            raise KeyError(step)
        name = self._ids.get(step)
        if name is None:
            attempt = self._attempts[step]
            name = batch_name(step, attempt)
        return RecordedBatch(
            step,
            name,
            self._crc32[step],
            self._tokens[step],
        )

    def __delitem__(self, step: int) -> None:
        if step not in self:
            raise KeyError(step)
        self._attempts[step] = _NONE
        self._ids.pop(step, None)
        self._num_batches -= 1

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        if not 0 <= step < len(self._attempts):
            return False
        return self._attempts[step] != _NONE

    def __iter__(self) -> Iterator[int]:
        for step, value in enumerate(self._attempts):
            if value != _NONE:
                yield step

    def __len__(self) -> int:
        return self._num_batches


class StepTable(MutableMapping[int, JournaledStep]):
    """The newest versions by the steps that made them."""

    def __init__(self) -> None:
        self._incarnations = array("q")
        self._versions = array("q")
        self._digests = bytearray()
        # Digests that are not the hexadecimal form of `_DIGEST_BYTES`.
        self._texts: dict[int, str] = {}
        self._num_steps = 0

    def stored(self) -> list[object]:
        """Returns the content as plain values, for `restored`."""
        return [
            self._num_steps,
            self._texts,
            self._incarnations.tobytes(),
            self._versions.tobytes(),
            bytes(self._digests),
        ]

    @classmethod
    def restored(cls, stored: Sequence[Any]) -> Self:
        """Returns the table whose content `stored` returned."""
        table = cls()
        table._num_steps, table._texts, incarnations, versions, digests = stored
        table._incarnations.frombytes(incarnations)
        table._versions.frombytes(versions)
        table._digests = bytearray(digests)
        return table

    def __setitem__(self, step: int, journaled: JournaledStep) -> None:
        num_missing = step + 1 - len(self._versions)
        if num_missing > 0:
            self._incarnations.extend([_NONE] * num_missing)
            self._versions.extend([_NONE] * num_missing)
            self._digests.extend(bytes(_DIGEST_BYTES * num_missing))
        self._num_steps += step not in self
        self._incarnations[step] = journaled.version.incarnation
        self._versions[step] = journaled.version.step
        self._texts.pop(step, None)
        place = _DIGEST_BYTES * step
        digest = _plain_digest(journaled.digest)
        if digest is None:
            self._texts[step] = journaled.digest
        else:
            self._digests[place : place + _DIGEST_BYTES] = digest

    def __getitem__(self, step: int) -> JournaledStep:
        if step not in self:
            raise KeyError(step)
        version = PolicyVersion(self._incarnations[step], self._versions[step])
        digest = self._texts.get(step)
        if digest is None:
            place = _DIGEST_BYTES * step
            digest = self._digests[place : place + _DIGEST_BYTES].hex()
        return JournaledStep(version, digest)

    def __delitem__(self, step: int) -> None:
        if step not in self:
            raise KeyError(step)
        self._incarnations[step] = _NONE
        self._texts.pop(step, None)
        self._num_steps -= 1

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        if not 0 <= step < len(self._incarnations):
            return False
        return self._incarnations[step] != _NONE

    def __iter__(self) -> Iterator[int]:
        for step, value in enumerate(self._incarnations):
            if value != _NONE:
                yield step

    def __len__(self) -> int:
        return self._num_steps


def _plain_digest(digest: str) -> bytes | None:
    """Returns the bytes of a digest, or None if their hexadecimal form is another text."""
    try:
        data = bytes.fromhex(digest)
    except ValueError:
        return None
    is_plain = len(data) == _DIGEST_BYTES and data.hex() == digest
    return data if is_plain else None
