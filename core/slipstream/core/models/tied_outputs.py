"""Files of a model with tied embeddings that hold a projection to the vocabulary all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slipstream.core.models.model_files import LENGTH_BYTES, read_header

_BLOCK_BYTES = 1 << 24


def are_equal(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two matrices, each by its file and name, have the same bytes.

    Both have the same shape. Matrices of different element types count as different.
    """
    types = [read_header(path)[name]["dtype"] for path, name in (first, second)]
    if types[0] != types[1]:
        return False
    return all(one == other for one, other in zip(_blocks(*first), _blocks(*second), strict=True))


def _blocks(path: Path, name: str) -> Iterator[bytes]:
    begin, end = read_header(path)[name]["data_offsets"]
    with path.open("rb") as file:
        data = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(data + begin)
        for place in range(begin, end, _BLOCK_BYTES):
            yield file.read(min(_BLOCK_BYTES, end - place))
