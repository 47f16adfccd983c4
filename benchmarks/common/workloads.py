"""The environments of the benchmarks; the workers of the rollout servers import this module."""

from __future__ import annotations

import asyncio
import io
import random
import statistics
from pathlib import Path
from typing import Any

from slipstream.client import Environment, StepResult

PROMPT = "w1 w2"
_POLL_S = 0.2


class LognormalReplies(Environment[int]):
    """Prompts whose replies have lognormal lengths; the reward is 1 for an odd number of words.

    The lengths are the distribution's quantiles at the places of van der Corput's sequence: every
    stretch of the sequence, long or short, has nearly the same sum and the same long tail.
    """

    # Number of lengths drawn so far, shared by the copies that the episodes run on.
    _drawn = 0

    def __init__(self, median: float, sigma: float, longest: int) -> None:
        """`sigma` is the standard deviation of the length's natural logarithm."""
        self._median = median
        self._sigma = sigma
        self._longest = longest

    def tasks(self) -> range:
        """Returns numbers without a meaning: every episode has its own length."""
        return range(1000)

    def reset(self, task: int) -> list[dict[str, str]]:
        """Sets the next length of the sequence, so that members of a group differ."""
        place = LognormalReplies._drawn
        LognormalReplies._drawn += 1
        self.max_reply_tokens = reply_length(place, self._median, self._sigma, self._longest)
        return [{"role": "user", "content": PROMPT}]

    def step(self, reply: str) -> StepResult:
        """Rewards about half of the replies: nothing can be learnt, but advantages differ."""
        return StepResult(reward=float(len(reply.split()) % 2))


class ImageReplies(LognormalReplies):
    """The same behind an image of noise, which is another one for each task."""

    def __init__(self, median: float, sigma: float, longest: int, side: int = 112) -> None:
        """`side` is that of an image, in pixels."""
        super().__init__(median, sigma, longest)
        self._side = side

    def reset(self, task: int) -> list[dict[str, Any]]:
        (message,) = super().reset(task)
        image = {"type": "image", "data": noise_png(self._side, task)}
        return [message | {"content": [image, {"type": "text", "text": PROMPT}]}]


class Gated(Environment[int]):
    """Episodes that begin when a file exists, and then take one whole reply each."""

    def __init__(self, gate: str) -> None:
        self._gate = Path(gate)

    def tasks(self) -> range:
        return range(1000)

    async def reset(self, task: int) -> list[dict[str, str]]:
        while not self._gate.exists():
            await asyncio.sleep(_POLL_S)
        return [{"role": "user", "content": PROMPT}]

    def step(self, reply: str) -> StepResult:
        """Rewards a reply with an odd number of words."""
        return StepResult(reward=float(len(reply.split()) % 2))


def noise_png(side: int, seed: int) -> bytes:
    """Returns a PNG of side * side random pixels."""
    from PIL import Image

    file = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side**2)).save(
        file, "PNG"
    )
    return file.getvalue()


def van_der_corput(place: int) -> float:
    """Returns the bits of `place` mirrored at the binary point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    value = 0.0
    weight = 0.5
    while place:
        value += weight * (place & 1)
        place >>= 1
        weight /= 2
    return value


def reply_length(place: int, median: float, sigma: float, longest: int) -> int:
    """Returns the tokens of the reply at `place` of the sequence."""
    # The share is the middle of its cell, since 0 has no quantile.
    share = van_der_corput(place % 4096) + 1 / 8192
    quantile = statistics.NormalDist(0.0, sigma).inv_cdf(share)
    return max(1, min(longest, round(median * 2.718281828459045**quantile)))
