"""Activation recomputation: how many layers recompute, planned by the memory of the GPU.

In the first training pass one layer keeps its activations and all others recompute theirs, so that
the pass fits wherever training fits at all. This pass measures the largest activation memory of a
layer, and all other memory of the pass. From the second pass on, when the optimizer has its state,
as many layers keep their activations as fit into memory. All ranks recompute equally many layers,
because a recomputed layer may communicate.
"""

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from slipstream.core.machine.gpus import ENGINES_SHARE
from slipstream.core.settings.sections import LearnerSection, ParallelSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks.parallel import Ranks

logger = logging.getLogger(__name__)

# Share of the memory that is left free, because the allocator cannot use all memory.
_MARGIN = 0.1


def memory_limit() -> int:
    """Returns the bytes of GPU memory that tensors may use; engines may not have theirs yet."""
    free, total = torch.cuda.mem_get_info()
    own_share = 1 - float(os.environ.get(ENGINES_SHARE, "0"))
    return min(free + torch.cuda.memory_reserved(), int(own_share * total))


def recomputed_layers(
    measured: tuple[float, float], *, layers: int, tokens: int, in_flight: int, free: float
) -> int:
    """Returns how many of `layers` must recompute so that a pass fits into `free` bytes.

    `measured` has the bytes per token that the layer keeps which keeps most, and those of all else
    in a pass in which one layer keeps its activations, these included. `tokens` is the limit of a
    micro batch, `in_flight` the number of micro batches whose activations a pipeline stage holds at
    one time.
    """
    of_layer = measured[0] * tokens * in_flight
    free_for_layers = free - measured[1] * tokens
    if free_for_layers < 0:
        return layers
    more = math.floor(free_for_layers / of_layer) if of_layer else layers
    return max(layers - 1 - more, 0)


class Recompute:
    """The recomputation plan of one model: measured in the first pass, made before the second."""

    def __init__(self, models: Sequence[Megatron], learner: LearnerSection) -> None:
        """Takes this rank's unwrapped chunks; at first each recomputes all layers but one."""
        blocks = [model.decoder for model in models]
        self._configs = {
            id(config): config
            for block, model in zip(blocks, models, strict=True)
            for config in (block.config, model.config)
        }.values()
        self._stack = [layer for block in blocks for layer in block.layers]
        self._layers = max(len(block.layers) for block in blocks)
        self._learner = learner
        # Bytes per token of the largest micro batch of the first training pass: activations of the
        # layer that keeps most, and all else that the pass alone allocates. None before it.
        self.measured: tuple[float, float] | None = None
        self._is_planned = False
        for block in blocks:
            block.register_forward_pre_hook(_with_gradient, with_kwargs=True)
        self._recompute(max(self._layers - 1, 0))

    @contextlib.contextmanager
    def training_pass(self, sizes: Sequence[int], ranks: Ranks) -> Iterator[None]:
        """Returns the context of a pass over micro batches of `sizes` tokens; collective."""
        if not self._is_planned and self.measured is not None:
            learner = self._learner
            measured = self.measured
            free = (1 - _MARGIN) * memory_limit() - torch.cuda.memory_allocated()
            num_layers = recomputed_layers(
                measured,
                layers=self._layers,
                tokens=learner.micro_batch_tokens,
                in_flight=in_flight(learner.parallel, ranks.stage),
                free=free,
            )
            # A stage may have no layer.
            share = torch.tensor([num_layers / max(self._layers, 1)], dtype=torch.float64)
            self._recompute(math.ceil(float(ranks.max(share)) * self._layers - 1e-9))
            self._is_planned = True
            logger.info(
                "%d of %d layers recompute their activations: one keeps %.1f kB a token, all else "
                "in a pass takes %.1f kB, and %.2f GB are free",
                self.num_layers,
                self._layers,
                measured[0] / 1e3,
                measured[1] / 1e3,
                free / 1e9,
            )
        if self._is_planned:
            yield
            return
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        starts: list[int] = []
        # Bytes that each forward pass of a layer keeps, also the second one of a recomputed layer.
        kept_bytes: list[int] = []

        def begin(*_: object) -> None:
            starts.append(torch.cuda.memory_allocated())

        def end(*_: object) -> None:
            kept_bytes.append(torch.cuda.memory_allocated() - starts.pop())

        hooks = [
            hook
            for layer in self._stack
            for hook in (layer.register_forward_pre_hook(begin), layer.register_forward_hook(end))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        most_tokens = max(sizes)
        rest = torch.cuda.max_memory_allocated() - before
        self.measured = max(kept_bytes, default=0) / most_tokens, rest / most_tokens

    def _recompute(self, layers: int) -> None:
        """Makes the first `layers` layers of each chunk recompute, and no others."""
        for config in self._configs:
            config.recompute_granularity = "full" if layers else None
            config.recompute_method = "block" if layers else None
            config.recompute_num_layers = layers or None
        self.num_layers = layers


def _with_gradient(
    _: object, arguments: tuple[object, ...], keywords: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Makes the input of a block require a gradient, as a pre-hook of the block's forward pass.

    Without it autograd would skip a recomputed layer whose input requires no gradient, as after
    frozen embeddings, and the layer's adapters would get no gradient.
    """
    hidden = keywords["hidden_states"]
    if torch.is_grad_enabled() and hidden is not None and not hidden.requires_grad:
        keywords["hidden_states"] = hidden.detach().requires_grad_()
    return arguments, keywords


def in_flight(parallel: ParallelSection, stage: int) -> int:
    """Returns the most micro batches whose activations pipeline stage `stage` holds at one time."""
    behind = parallel.pp - 1 - stage
    if parallel.vpp is None:
        return behind + 1
    # Megatron's interleaved schedule begins with this many forward passes of chunks.
    return 2 * behind + (parallel.vpp - 1) * parallel.pp + 1
