"""Group advantages, pure functions over rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

STD_EPS = 1e-6


def group_advantages(
    rewards: FloatArray, group_ids: Sequence[str], *, normalize_by_std: bool
) -> FloatArray:
    """Each reward less its group's mean, over its group's deviation + 1e-6 if asked for.

    The deviation is that of the group itself (its mean square, no correction of the degrees of
    freedom), so rewards 0 and 1 in equal numbers give -1 and 1. A group of equal rewards gives 0.
    Source: GRPO (arXiv:2402.03300).
    """
    advantages = np.zeros(len(rewards), dtype=np.float64)
    ids = np.asarray(group_ids)
    for group_id in dict.fromkeys(group_ids):
        members = ids == group_id
        centred = rewards[members] - rewards[members].mean()
        if normalize_by_std:
            centred = centred / (np.sqrt(np.mean(centred**2)) + STD_EPS)
        advantages[members] = centred
    return advantages


def shuffled(rewards: FloatArray, *, seed: int, step: int) -> FloatArray:
    """The same rewards in another order, which `seed` and `step` alone decide: a control."""
    return np.random.default_rng([seed, step]).permutation(rewards)
