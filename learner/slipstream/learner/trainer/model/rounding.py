"""Makes the 16-bit weights, which are trained and served, from the optimizer's float32 masters."""

import functools
from collections.abc import Iterator

import torch
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

# Multipliers and shifts of MurmurHash3's 32-bit finalizer, which spreads every bit over all bits.
_MULTIPLIERS = (-0x7A143595, -0x3D4D51CB)
_SHIFTS = (16, 13, 16)
_LOW = 0xFFFF


def stochastic_bfloat16(masters: Tensor, *, seed: int) -> Tensor:
    """Rounds float32 `masters` stochastically to bfloat16: the nearer value is the more likely.

    The choice depends only on the master's bits and `seed`. So it is the same in every layout, in a
    replay and after a resume, and a weight whose master did not change does not change either.
    Makes an int32 copy of `masters`.
    """
    bits = masters.contiguous().view(torch.int32)
    mixed = bits ^ (seed & 0x7FFFFFFF)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # torch shifts the sign bit in, but the hash needs zeros.
        mixed ^= (mixed >> shift) & ((1 << (32 - shift)) - 1)
        if multiplier is not None:
            mixed *= multiplier
    # The cut-off bits carry into the kept bits with a probability equal to their share.
    mixed &= _LOW
    mixed += bits
    mixed &= ~_LOW
    return mixed.view(torch.float32).to(torch.bfloat16)


class Rounding:
    """Copies masters to weights after every update, and counts the weights that this changes.

        rounding = Rounding(optimizer, seed=None)     # to nearest
        ...                                           # updates
        share = rounding.changed_share(ranks)         # since the last call

    Megatron's own copying is kept where there are no masters (float32), and with 8-bit weights or a
    precision-aware optimizer, which keeps its masters elsewhere: then `changed_share` returns None.
    """

    def __init__(self, optimizer: Megatron, *, seed: int | None) -> None:
        """Replaces how `optimizer` copies masters to weights; `seed` makes rounding stochastic."""
        self._seed = seed
        self._changed: Tensor | int = 0
        self._total = 0
        for part in optimizer.chained_optimizers:
            if not part.is_stub_optimizer and _has_masters(part):
                part._copy_main_params_to_model_params = functools.partial(self._copy, part)

    @torch.no_grad()
    def _copy(self, part: Megatron) -> None:
        for weight, master in _pairs(part):
            if weight.dtype == torch.float32:
                weight.copy_(master)
                continue
            own = master.view_as(weight)
            new = own if self._seed is None else stochastic_bfloat16(own, seed=self._seed)
            new = new.to(weight.dtype)
            self._changed = self._changed + (new != weight).sum()
            self._total += weight.numel()
            weight.copy_(new)

    def changed_share(self, ranks: Ranks) -> float | None:
        """Returns the fraction of weights that an update changed, on average; collective.

        The mean is over the updates since the last call. Returns None if no weights were copied
        from masters.
        """
        found = ranks.sum(torch.tensor([float(self._changed), float(self._total)]))
        self._changed, self._total = 0, 0
        changed, total = found.tolist()
        return changed / total if total else None


def _has_masters(part: Megatron) -> bool:
    """Whether this part of an optimizer keeps float32 masters of 16-bit weights."""
    from megatron.core.fp8_utils import is_float8tensor

    config = part.config
    if not (config.bf16 or config.fp16) or config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return False
    groups = getattr(part, "model_float16_groups", None) or getattr(part, "float16_groups", [])
    return not any(is_float8tensor(weight) for group in groups for weight in group)


def _pairs(part: Megatron) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's weights and their masters, as Megatron-Core 0.16.1 pairs them."""
    if not hasattr(part, "shard_fp32_from_float16_groups"):
        yield from zip(*part._get_model_and_main_params_data_float16(), strict=True)
        return
    halves = (part.shard_fp32_from_float16_groups, part.model_float16_groups)
    singles = (part.shard_fp32_groups, part.model_fp32_groups)
    for masters, weights in (halves, singles):
        for master_group, weight_group in zip(masters, weights, strict=True):
            for master, weight in zip(master_group, weight_group, strict=True):
                place = part._get_model_param_range_map(weight)["gbuf_world_in_bucket"]
                buffer, _, bucket = part.model_param_gbuf_map[weight]
                flat = part.buffers[buffer].buckets[bucket].param_data.view(-1)
                yield flat[place.start : place.end], master.data
