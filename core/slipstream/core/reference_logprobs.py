"""Log-probabilities that a reference model behind a server gave for an episode."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The protocol's bound of `top_k`; see trajectory.proto.
MAX_TOP_K = 128
# Rounding may bring a logarithm of 1 so far above 0, and a sum of probabilities so far above 1.
_LARGEST_LOGPROB, _LARGEST_SUM = 1e-3, 1.01


@dataclass(frozen=True, eq=False)
class ReferenceLogprobs:
    """The reference model's log-probabilities of sampled tokens, and its most likely tokens.

    `logprobs` is float32 [sampled tokens], `top_ids` uint32 and `top_logprobs` float32 [sampled
    tokens, top_k]; natural logarithms at temperature 1. A sampled first token of a sequence, which
    nothing predicts, has zeros. The most likely tokens have no order.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]

    @property
    def top_k(self) -> int:
        """The number of most likely tokens at each position."""
        return int(self.top_ids.shape[1])


def check_reference(found: ReferenceLogprobs, unpredicted: Sequence[int] = ()) -> str:
    """The reason why these are no log-probabilities; empty: they can be.

    Nothing predicts the sampled tokens at `unpredicted`: their rows are not read.
    """
    for values in (found.logprobs, found.top_logprobs):
        if values.size and not (highest := float(values.max())) <= _LARGEST_LOGPROB:
            return f"a log-probability of the reference is {highest:g}, above 0"
        if not np.isfinite(values).all():
            return "a log-probability of the reference is not a finite number"
    if not found.top_ids.size:
        return ""
    predicted = np.ones(len(found.logprobs), dtype=np.bool_)
    predicted[list(unpredicted)] = False
    ordered = np.sort(found.top_ids[predicted], axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "the reference names a token twice among its most likely tokens"
    sums = np.exp(found.top_logprobs[predicted].astype(np.float64)).sum(axis=1)
    if sums.size and sums.max() > _LARGEST_SUM:
        return f"probabilities of the reference add up to {sums.max():g}, above 1"
    return ""


def reference_bytes_per_token(top_k: int) -> int:
    """Returns the most bytes of one token's log-probabilities on the wire."""
    return 4 + 8 * top_k
