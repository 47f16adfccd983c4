"""The environment whose episodes `throughput.py` and `flow.py` lease."""

from __future__ import annotations

import random

from slipstream.client import Environment, StepResult

from benchmarks.rollout.engines import WORDS

# A prompt is "<s>", words and "<reply>".
SPECIAL_TOKENS = 2


class RandomWords(Environment[int]):
    """Prompts of random words, each task its own; any reply ends the episode."""

    def __init__(self, num_words: int) -> None:
        """`num_words` in every prompt."""
        self._num_words = num_words

    def tasks(self) -> range:
        return range(1_000_000)

    def reset(self, task: int) -> list[dict[str, str]]:
        words = random.Random(task).choices(WORDS, k=self._num_words)
        return [{"role": "user", "content": " ".join(words)}]

    def step(self, reply: str) -> StepResult:
        """Nothing is to be learnt here."""
        return StepResult(reward=0.0)
