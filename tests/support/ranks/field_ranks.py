"""Program of one rank: the log-probabilities that the learner gives to the tokens of a probe."""

from pathlib import Path

import numpy as np

from support.fakes.field_models import VOCAB
from support.ranks.rank_program import kept, opened, score, settings_of

# Long enough for what is scaled, waves of thousands of tokens, to show.
LENGTH = 512


def probe() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, LENGTH).astype(np.int32) for _ in range(2)]


def run_rank(folder: Path, job: str) -> None:
    lengths = {"learner": {"micro_batch_tokens": LENGTH}}
    policy = opened(settings_of(folder / job, lengths))
    kept(policy, score(policy, probe(), max_tokens=LENGTH), folder / f"{job}.pt")
