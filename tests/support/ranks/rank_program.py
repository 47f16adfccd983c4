"""The common part of rank programs: settings, the opened policy, its weights, the kept result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config

if TYPE_CHECKING:
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.model.policy import Policy

STEPS = 3
SETTINGS = {
    "run": {"name": "parity", "steps": STEPS},
    "algorithm": {
        "group_size": 4,
        "groups_per_step": 2,
        "max_staleness": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "weight_args": {"cap": 1.2},
    },
    "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 40, "temperature": 0.8},
    # A small eps would turn the rounding of gradients near 0 into steps of the learning rate.
    "learner": {
        "micro_batch_tokens": 96,
        "shared_prefix_tokens": 0,
        "weight_decay": 0.01,
        "ddp": {"use_distributed_optimizer": False},
        "optimizer": {"adam_eps": 1e-3},
        "timeout_s": 300.0,
    },
}


def settings_of(
    model: Path, *changes: Mapping[str, Mapping[str, object]], dtype: str = "float32"
) -> Config:
    """Returns `SETTINGS` for the folder `model`, with the keys by table in `changes` changed."""
    table = json.loads(json.dumps(SETTINGS))
    for sections in ({"model": {"path": str(model), "dtype": dtype}}, *changes):
        for name, values in sections.items():
            table[name] = table.get(name, {}) | values
    return parse_config(table, source=str(model))


def opened(config: Config) -> Policy:
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    return open_policy(config, Launch.from_environment())


def kept(policy: Policy, found: object, path: Path) -> None:
    """Saves what rank 0 saw, and closes the groups of every rank."""
    if policy.ranks.is_main:
        torch.save(found, path)
    policy.ranks.close()


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Every weight by its name in the files, adapters merged."""
    from slipstream.learner.trainer.weights.export import hf_tensors

    return {name: tensor.clone() for name, tensor in hf_tensors(policy, torch.float32)}


def score(
    policy: Policy, sequences: Sequence[np.ndarray], *, max_tokens: int = 64
) -> torch.Tensor:
    """Log-probabilities of all tokens, in one row."""
    from slipstream.learner.trainer.model.schedule import sequence_logprobs

    all_logprobs = sequence_logprobs(
        dataclasses.replace(policy, max_tokens=max_tokens), sequences
    )
    return torch.from_numpy(np.concatenate(all_logprobs))


def likelier(
    policy: Policy, sequences: Sequence[TrainingSequence], rate: float
) -> float:
    """One optimizer step towards the sequences; returns the norm of its gradient."""
    from slipstream.learner.trainer.algorithms.loss import TokenLoss
    from slipstream.learner.trainer.model.schedule import (
        forward_backward,
        rank_micro_batches,
        update_weights,
    )

    def loss(_place, micro_batch, logprobs, _entropy) -> TokenLoss:
        mask = micro_batch.loss_mask
        total = -(logprobs * mask).sum()
        return TokenLoss(total, mask.sum(), None, logprobs.detach())

    batches = rank_micro_batches(policy, sequences, range(len(sequences)))

    def backward() -> None:
        policy.zero_grad()
        forward_backward(policy, batches, loss, temperature=1.0)

    backward()
    return update_weights(policy, rate, backward)
