"""Repeat two letters: the smallest task that a model must read its prompt for."""

from __future__ import annotations

import random
import string
from typing import Literal, TypeAlias

from slipstream.client.environment import Environment, Message, StepResult

Pair: TypeAlias = tuple[str, str]

HELDOUT_SHARE = 0.2


class Echo(Environment[Pair]):
    """The prompt is "a b", the right reply "a b a b".

    Its two letters in turn, `reply_length` words.

    The reward is the share of the first `reply_length` words that are right; words after them do
    not count, missing ones are wrong. Of all ordered pairs of letters about a fifth is held out,
    chosen by `seed`, so that every letter still occurs in training in both places.
    """

    def __init__(
        self,
        num_symbols: int = 8,
        reply_length: int = 4,
        split: Literal["train", "heldout"] = "train",
        seed: int = 0,
    ) -> None:
        """ValueError names the argument that cannot work."""
        if not 2 <= num_symbols <= len(string.ascii_lowercase):
            raise ValueError(f"num_symbols must be from 2 to 26, got {num_symbols}")
        if reply_length < 1:
            raise ValueError(f"reply_length must be at least 1, got {reply_length}")
        if split not in ("train", "heldout"):
            raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
        self._reply_length = reply_length
        train, heldout = split_pairs(num_symbols, seed)
        self._pairs = train if split == "train" else heldout
        self._answer: list[str] = []

    def tasks(self) -> list[Pair]:
        """Ordered pairs of letters."""
        return self._pairs

    def reset(self, task: Pair) -> list[Message]:
        """Shows the pair."""
        self._answer = [task[index % 2] for index in range(self._reply_length)]
        return [Message("user", " ".join(task))]

    def step(self, reply: str) -> StepResult:
        """Compares word by word."""
        # A shorter reply leaves the places at its end without a word.
        words = reply.split()
        right = sum(said == word for said, word in zip(words, self._answer, strict=False))
        return StepResult(reward=right / self._reply_length)


def split_pairs(num_symbols: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """All ordered pairs in a random order, as training and held-out ones.

    The pairs (x, successor of x in a random circle) stay in training: so each letter is seen first
    and second there.
    """
    letters = list(string.ascii_lowercase[:num_symbols])
    generator = random.Random(seed)
    circle = generator.sample(letters, num_symbols)
    kept = set(zip(circle, circle[1:] + circle[:1], strict=True))
    pairs = [(first, second) for first in letters for second in letters]
    generator.shuffle(pairs)
    num_heldout = max(1, round(HELDOUT_SHARE * len(pairs)))
    heldout = [pair for pair in pairs if pair not in kept][:num_heldout]
    chosen = set(heldout)
    return [pair for pair in pairs if pair not in chosen], heldout
