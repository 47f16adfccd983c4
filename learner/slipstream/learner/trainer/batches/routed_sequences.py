"""Packed sequences with the experts to which their tokens are routed, or with paths.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from slipstream.learner.trainer.batches.micro_batch import Paths
from torch import Tensor


@dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """The object that Megatron passes to every layer with a micro batch, also on recomputation.

    Experts travel in it so that every layer, in the forward pass and when recomputed, has the
    experts of its current micro batch.
    """

    # The ids of `MicroBatch.expert_ids`; None if the routers choose.
    expert_ids: Tensor | None = None


@dataclass
class SharedSequences(RoutedSequences):
    """The object that Megatron passes to every layer with a micro batch of shared prefixes.

    For the rotary embedding the micro batch is one sequence, whose angles `PrefixSharing` arranges
    by token. The true bounds are in `bounds` and `paths`.
    """

    bounds: Tensor | None = None
    max_queries: int = 0
    paths: Paths | None = None
