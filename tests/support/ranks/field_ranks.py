"""Program of one rank: the log-probabilities that the learner gives to the tokens of a probe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config

from support.fakes.field_models import VOCAB

# Long enough for what is scaled, waves of thousands of tokens, to show.
LENGTH = 512


def probe() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, LENGTH).astype(np.int32) for _ in range(2)]


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.model.schedule import sequence_logprobs
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    table = {
        "run": {"name": "fields", "steps": 1},
        "model": {"path": str(folder / job), "dtype": "float32"},
        "algorithm": {"group_size": 2, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": LENGTH},
    }
    policy = open_policy(parse_config(table, source="test"), Launch.from_environment())
    found = np.concatenate(sequence_logprobs(policy, probe(), max_tokens=LENGTH))
    torch.save(torch.from_numpy(found), folder / f"{job}.pt")
    policy.ranks.close()
