"""Megatron's packed-sequence parameters, extended by replayed experts, padding and shared prefixes.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from slipstream.learner.trainer.batches.micro_batch import Paths
from torch import Tensor


@dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """Packed-sequence parameters with what routers need to know of the tokens.

    Megatron passes this object to every layer, also when it recomputes the layer, so that each
    router gets the experts of the current micro batch.
    """

    # Same as `MicroBatch.expert_ids`; None if the routers choose.
    expert_ids: Tensor | None = None
    # Same as `MicroBatch.is_padding`.
    is_padding: Tensor | None = None


@dataclass
class SharedSequences(RoutedSequences):
    """Packed-sequence parameters of a micro batch whose sequences share prefixes.

    Megatron's own fields describe the micro batch as one sequence; `PrefixSharing` gives each token
    the rotary angles of its position. The bounds of the segments are in `bounds` and `paths`.
    """

    bounds: Tensor | None = None
    max_queries: int = 0
    paths: Paths | None = None
