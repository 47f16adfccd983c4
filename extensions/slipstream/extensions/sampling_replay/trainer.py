"""Counts the tokens that the sampled tokens of a step were drawn from."""

import numpy as np
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart


class KeptTokenCounts(StepPart):
    """Says how many tokens were kept, and of how many sampled tokens nothing is recorded."""

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        counts_by_trajectory = [
            KeptTokens.packed_counts(trajectory.kept_tokens, trajectory.num_sampled_tokens)
            for trajectory in batch.trajectories
            if not trajectory.is_given
        ]
        counts = np.concatenate([*counts_by_trajectory, np.zeros(0, dtype=np.int64)])
        num_tokens = max(1, len(counts))
        num_recorded = int(np.count_nonzero(counts))
        num_missing = len(counts) - num_recorded
        num_kept = int(counts.sum())
        return {
            "kept_tokens_mean": num_kept / max(1, num_recorded),
            "kept_tokens_unrecorded": num_missing / num_tokens,
        }


def step_part(_: Config, __: Policy) -> KeptTokenCounts:
    """Returns the part that counts kept tokens."""
    return KeptTokenCounts()
