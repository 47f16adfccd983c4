"""Name the colour of a square: the smallest task for which a model must see an image."""

import random
import struct
import zlib
from typing import TypeAlias

from slipstream.client.environment import Environment, Message, StepResult, answer_of

# A colour, and the left and upper edge of the square.
Square: TypeAlias = tuple[str, int, int]

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (230, 220, 30),
}
SIDE = 56
SQUARE = 28


class Colours(Environment[Square]):
    """The prompt is an image of a coloured square on grey; the right reply is the colour's name.

    The square stands at one of several places, chosen by `seed`. The first word of a reply is
    judged.
    """

    def __init__(self, num_tasks: int = 64, seed: int = 0) -> None:
        generator = random.Random(seed)
        places = range(0, SIDE - SQUARE + 1, SQUARE // 2)
        self._tasks = [
            (colour, generator.choice(places), generator.choice(places))
            for colour, _ in zip(list(COLOURS) * num_tasks, range(num_tasks), strict=False)
        ]
        self._colour = ""

    def tasks(self) -> list[Square]:
        """Returns the squares, all colours in turn."""
        return self._tasks

    def reset(self, task: Square) -> list[Message]:
        """Shows the square."""
        self._colour, left, top = task
        image = {"type": "image", "data": square_png(COLOURS[self._colour], left, top)}
        return [Message("user", [image, {"type": "text", "text": "colour"}])]

    def step(self, reply: str) -> StepResult:
        """Judges the first word of a reply."""
        return StepResult(reward=float(answer_of(reply).split()[:1] == [self._colour]))


def square_png(colour: tuple[int, int, int], left: int, top: int) -> bytes:
    """Returns a PNG of SIDE * SIDE grey pixels with a square of `colour`."""
    grey = bytes((128, 128, 128))
    with_square = grey * left + bytes(colour) * SQUARE + grey * (SIDE - SQUARE - left)
    rows = (with_square if top <= row < top + SQUARE else grey * SIDE for row in range(SIDE))
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in chunks)


def _chunk(name: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + check
