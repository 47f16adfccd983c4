"""Files of a model with tied embeddings that hold a projection to the vocabulary all the same."""

from __future__ import annotations

from pathlib import Path

from slipstream.protocol.settings.model_files import LENGTH_BYTES, read_header

# Most rows that are compared: training changes nearly all of them.
_ROWS = 256


def are_equal(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two matrices, each by its file and name, are equal in rows spread over all of them.

    Both have the same shape. Matrices of different element types count as different.
    """
    found, other = (_rows(path, name) for path, name in (first, second))
    return found == other


def _rows(path: Path, name: str) -> tuple[str, list[bytes]]:
    """Returns the element type of a matrix, and some of its rows."""
    header = read_header(path)[name]
    begin, end = header["data_offsets"]
    number: int = header["shape"][0]
    size = (end - begin) // max(1, number)
    with path.open("rb") as file:
        data = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little") + begin
        rows = []
        for place in sorted({number * part // _ROWS for part in range(_ROWS)}):
            file.seek(data + place * size)
            rows.append(file.read(size))
    return header["dtype"], rows
