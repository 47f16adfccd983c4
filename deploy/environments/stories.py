"""Stories whose sentences begin with one name: a small model learns from some hundred tokens."""

import random
import re

from slipstream.client import Environment, StepResult

NAMES = [
    "Anna",
    "Ben",
    "Carl",
    "Dora",
    "Eve",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kate",
    "Liam",
]
SUBJECTS = [
    "a lost dog",
    "a rainy day",
    "the sea",
    "a broken clock",
    "a long walk",
    "a birthday",
    "the first snow",
    "a red kite",
    "a night train",
    "an old map",
    "a garden",
    "a thunderstorm",
    "a lighthouse",
    "a market",
    "a letter",
    "a bicycle",
]
PROMPT = (
    "Write a story of ten sentences about {subject}. Begin every sentence with the name {name}."
)
NUM_SENTENCES = 10
# Fewer words are no sentence.
MIN_WORDS = 6


class Stories(Environment[list[str]]):
    """Rewards the share of sentences that begin with the name.

    Ten different ones earn 1. A sentence that is told again, has fewer than six words or no end
    earns nothing, and the sentences after the tenth count against the reply.
    """

    def tasks(self) -> list[list[str]]:
        """Returns name and subject of each story; the same in every run."""
        pairs = [[name, subject] for name in NAMES for subject in SUBJECTS]
        random.Random(1).shuffle(pairs)
        return pairs

    def reset(self, task: list[str]) -> list[dict[str, str]]:
        """Returns the wish for a story as a user's message."""
        self.name, subject = task
        return [{"role": "user", "content": PROMPT.format(name=self.name, subject=subject)}]

    def step(self, reply: str) -> StepResult:
        """Rewards the sentences of one reply."""
        sentences = [text for text in re.split(r"(?<=[.!?])\s+", reply.strip()) if text]
        right = {text for text in sentences if self._is_right(text)}
        num_right = min(len(right), NUM_SENTENCES)
        return StepResult(reward=num_right / max(NUM_SENTENCES, len(sentences)))

    def _is_right(self, sentence: str) -> bool:
        words = sentence.split()
        begins = words[0].strip(",") == self.name
        return begins and len(words) >= MIN_WORDS and sentence.endswith((".", "!", "?"))
