"""An environment whose prompt is two letters, which the reply must name.

It is the smallest task for which a model must read its prompt.
"""

import itertools
import random
import string
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field
from slipstream.client.environment import Environment, Message, StepResult, answer_of
from slipstream.core.arguments import checked

Pair: TypeAlias = tuple[str, str]

HELDOUT_SHARE = 0.2


class Echo(Environment[Pair]):
    """The prompt is two letters; the right reply names both of them, and nothing else.

    The first `reply_length` words of a reply are judged. Half of the reward is the share of these
    words that are letters of the prompt; a missing word counts as wrong. The other half is the
    share of the prompt's letters that are among these words. About a fifth of all ordered pairs of
    different letters is held out, chosen by `seed`. In training every letter still occurs in both
    positions.
    """

    @checked
    def __init__(
        self,
        num_symbols: Annotated[int, Field(ge=3, le=len(string.ascii_lowercase))] = 12,
        reply_length: Annotated[int, Field(ge=2)] = 4,
        split: Literal["train", "heldout"] = "train",
        seed: int = 0,
    ) -> None:
        """The letters are the first `num_symbols` of the alphabet.

        Raises ConfigError, which names the argument, for invalid arguments.
        """
        self._reply_length = reply_length
        train, heldout = split_pairs(num_symbols, seed)
        self._pairs = train if split == "train" else heldout
        self._symbols = set(string.ascii_lowercase[:num_symbols])
        self._letters: Pair = ("", "")

    def tasks(self) -> list[Pair]:
        return self._pairs

    def reset(self, task: Pair) -> list[Message]:
        self._letters, self.right_reply = task, self._words(task)
        self.wrong_reply = self._words(sorted(self._symbols - set(task)))
        return [Message("user", " ".join(task))]

    def _words(self, letters: Sequence[str]) -> str:
        """Returns a reply of the judged length with these letters."""
        return " ".join(itertools.islice(itertools.cycle(letters), self._reply_length))

    def step(self, reply: str) -> StepResult:
        words = answer_of(reply).split()[: self._reply_length]
        right = sum(word in self._letters for word in words) / self._reply_length
        named_share = sum(letter in words for letter in self._letters) / len(self._letters)
        return StepResult(
            reward=(right + named_share) / 2, metrics={"right": right, "named": named_share}
        )


def split_pairs(num_symbols: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs of letters for training, and the held-out pairs.

    Together these are all ordered pairs of different letters, shuffled by `seed`. The pairs (x,
    successor of x in a random circle) stay in training, so that each letter occurs there in the
    first and in the second place.
    """
    letters = list(string.ascii_lowercase[:num_symbols])
    generator = random.Random(seed)
    circle = generator.sample(letters, num_symbols)
    circle_pairs = set(zip(circle, circle[1:] + circle[:1], strict=True))
    pairs = [(first, second) for first in letters for second in letters if first != second]
    generator.shuffle(pairs)
    num_heldout = max(1, round(HELDOUT_SHARE * len(pairs)))
    heldout = [pair for pair in pairs if pair not in circle_pairs][:num_heldout]
    heldout_pairs = set(heldout)
    return [pair for pair in pairs if pair not in heldout_pairs], heldout
