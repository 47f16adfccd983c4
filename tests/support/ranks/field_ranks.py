"""Program of one rank: the log-probabilities that the learner gives to the tokens of a probe."""

from pathlib import Path

import numpy as np
from slipstream.core.configuration.config_file import parse_config

from support.fakes.field_models import VOCAB
from support.ranks.rank_program import kept, opened, score

# Long enough for what is scaled, waves of thousands of tokens, to show.
LENGTH = 512


def probe() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, LENGTH).astype(np.int32) for _ in range(2)]


def run_rank(folder: Path, job: str) -> None:

    table = {
        "run": {"name": "fields", "steps": 1},
        "model": {"path": str(folder / job), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": LENGTH},
    }
    policy = opened(parse_config(table, source="test"))
    kept(policy, score(policy, probe(), max_tokens=LENGTH), folder / f"{job}.pt")
