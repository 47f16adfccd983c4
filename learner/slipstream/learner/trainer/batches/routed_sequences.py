"""Packed sequences with the experts that their tokens are to go to.

Import it only after `compat.install`: the class is defined by inheriting from Megatron's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """What Megatron hands to every layer with a micro batch, also when it recomputes the layer.

    That is why the experts travel in it: whichever micro batch a layer works on, forward or again
    on the way back, they are that micro batch's.
    """

    # As `MicroBatch.expert_ids`; None: the routers choose.
    expert_ids: Tensor | None = None
