"""A check of the gradients of a model's attention before the model trains.

TransformerEngine chooses a kernel at the first call, by shapes and library versions. Kernels differ
by GPU, by library and by head size, and some are wrong: for heads of 256 dimensions on a Hopper
GPU, cuDNN 9.14 returns gradients that are up to 70% off, and sometimes NaN. A run would train with
these gradients. So each kind of attention in a model is compared with plain operations in float64,
over a few short packed sequences. In a model that shares prefixes each kind is also checked over
sequences with shared prefixes, as such calls may use another kernel.

Produces: nothing, or ConfigError. Waits for: the other ranks, which compute parts of the same
sequences. Unblocked by: their parts, or the limit of their group.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.training_sequence import Paths, zigzag
from slipstream.learner.trainer.model.model import ParallelModel
from slipstream.learner.trainer.model.sharing import Sharing
from torch import Tensor

# Rounding to bfloat16 gives 0.005.
MOST_ERROR = 0.03
# Lengths in units of `2 * cp` tokens: one token, whole blocks of kernels, and others.
_LENGTHS = (1, 32, 19, 96, 7)
# Index of the earlier sequence that each sequence continues, or None, where prefixes are shared.
_BEFORE = (None, None, 0, 2, 2)
# About the value of all scores of the second sequence; some kernels have made NaN of such scores.
# The gradients of this sequence are too badly conditioned to be compared.
_LOW_SCORE = -120.0
_SEED = 20
# The queries of a sequence, and the indices of all keys on its path, which they see.
Path = tuple[range, list[int]]
_COMPARED = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")


@dataclass(frozen=True)
class AttentionKind:
    """The properties in which the attention layers of a model may differ."""

    module: type
    heads: int
    groups: int
    # Dimensions of queries and keys, and of values.
    size: int
    value_size: int
    # Number of tokens that a query sees, its own included; 0 means all tokens before it.
    window: int
    scale: float
    has_sinks: bool
    # How context parallel ranks share a sequence; "" without TransformerEngine.
    exchange: str


def check_attention(model: ParallelModel) -> None:
    """Raises ConfigError if attention is wrong here; collective over context parallel ranks."""
    kinds: dict[AttentionKind, Megatron] = {}
    for module in (module for chunk in model.chunks for module in chunk.modules()):
        if hasattr(module, "core_attention"):
            kinds.setdefault(kind_of(module), module)
    for kind, attention in kinds.items():
        _check(model, kind, attention, None)
        if model.sharing is not None:
            _check(model, kind, attention, model.sharing)


def kind_of(attention: Megatron) -> AttentionKind:
    """Returns the kind of an attention layer, whose `core_attention` is checked."""
    from megatron.core.transformer.utils import is_layer_window_attention

    core = attention.core_attention
    config = attention.config
    is_latent = getattr(config, "multi_latent_attention", False)
    size = config.qk_head_dim + config.qk_pos_emb_head_dim if is_latent else config.kv_channels
    has_window = is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, attention.layer_number
    )
    # TransformerEngine keeps the scale in its kernels.
    holder = core if hasattr(core, "softmax_scale") else core.unfused_attention
    return AttentionKind(
        module=type(core),
        heads=attention.num_attention_heads_per_partition,
        groups=attention.num_query_groups_per_partition,
        size=size,
        value_size=config.v_head_dim if is_latent else size,
        window=config.window_size[0] + 1 if has_window else 0,
        scale=float(holder.softmax_scale),
        has_sinks=getattr(core, "softmax_offset", None) is not None,
        exchange=getattr(core, "cp_comm_type", ""),
    )


def _check(
    model: ParallelModel,
    kind: AttentionKind,
    attention: Megatron,
    sharing: Sharing | None,
) -> None:
    """Raises ConfigError where one kind is wrong, over sequences that share prefixes if given."""
    from slipstream.learner.trainer.layers.attention import SharedSequences, packed_sequences

    ranks = model.ranks
    lengths = [2 * ranks.cp_size * length for length in _LENGTHS]
    bounds = [0, *itertools.accumulate(lengths)]
    paths = _paths(bounds, are_shared=sharing is not None)
    random = torch.Generator().manual_seed(_SEED)

    def drawn(heads: int, size: int) -> Tensor:
        random_tensor = torch.randn(
            bounds[-1],
            heads,
            size,
            generator=random,
        )
        return random_tensor.to(ranks.device, model.dtype)

    query = drawn(kind.heads, kind.size)
    key = drawn(kind.groups, kind.size)
    value = drawn(kind.groups, kind.value_size)
    gradient = drawn(kind.heads, kind.value_size)
    low = slice(bounds[1], bounds[2])
    query[low, :, 0] = 1.0
    key[low, :, 0] = _LOW_SCORE / kind.scale
    places = zigzag(bounds, ranks.cp_rank, ranks.cp_size).to(ranks.device)
    is_compared = (places < low.start) | (places >= low.stop)
    own_inputs = [tensor[places].requires_grad_() for tensor in (query, key, value)]
    keywords = {"attn_mask_type": attention.attn_mask_type, "attention_bias": None}
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=ranks.device)
    longest = max(lengths)
    with torch.enable_grad():
        if sharing is not None:
            keys = Paths.of([np.array(places) for _, places in paths], bounds[-1])
            shared = SharedSequences(
                bounds=cu_seqlens, max_queries=longest, paths=keys.to(ranks.device)
            )
            arguments, keywords = sharing.by_paths((*own_inputs, None), keywords, shared)
        else:
            arguments = (*own_inputs, None)
            keywords["packed_seq_params"] = packed_sequences(cu_seqlens, longest, ranks.cp_size)
        # Hooks of data parallelism run in `__call__`: they would gather the sinks.
        output = attention.core_attention.forward(*arguments, **keywords)
        # Parameters get no gradients here: training would collect them.
        gradients = torch.autograd.grad(output, own_inputs, gradient[places].view_as(output))
        sinks = attention.core_attention.softmax_offset if kind.has_sinks else None
        expected = _plain(
            kind,
            (query, key, value, gradient),
            paths,
            sinks,
        )
    computed = output.view(len(places), kind.heads, -1), *gradients
    for name, ours, theirs in zip(
        _COMPARED,
        computed,
        expected,
        strict=True,
    ):
        right = theirs[places][is_compared].detach()
        error = float((ours[is_compared].detach().double() - right).norm() / right.norm())
        is_finite = bool(ours.isfinite().all())
        if not is_finite or error > MOST_ERROR:
            wrong = f"{error:.0%} off" if is_finite else "not finite"
            raise _wrong_kernel(kind, f"{name} are {wrong}", are_shared=sharing is not None)


def _paths(bounds: Sequence[int], *, are_shared: bool) -> list[Path]:
    """Returns the path of each sequence between `bounds`."""
    paths: list[Path] = []
    before = _BEFORE if are_shared else [None] * (len(bounds) - 1)
    for (start, end), earlier in zip(itertools.pairwise(bounds), before, strict=True):
        seen = [] if earlier is None else paths[earlier][1]
        paths.append((range(start, end), [*seen, *range(start, end)]))
    return paths


def _wrong_kernel(kind: AttentionKind, what: str, *, are_shared: bool) -> ConfigError:
    """Returns the error for a kernel of which `what` is wrong, with what to take instead."""
    from slipstream.learner.trainer.layers.attention import CoreAttention, kernel_and_remedy

    kernel, remedy = kernel_and_remedy(of_torch=issubclass(kind.module, CoreAttention))
    where = " and shared prefixes" if are_shared else ""
    if are_shared:
        remedy += ", or learner.shared_prefix_tokens = 0"
    return ConfigError(
        f"the attention of this machine is wrong for heads of {kind.size} dimensions"
        f"{where}: {kernel}: {what}, at most {MOST_ERROR:.0%} is rounding. "
        f"Take {remedy}"
    )


def _plain(
    kind: AttentionKind,
    packed: Sequence[Tensor],
    paths: Sequence[Path],
    sinks: Tensor | None,
) -> list[Tensor]:
    """Returns the tensors named by `_COMPARED`, computed with plain operations in float64.

    `packed` has queries, keys, values and the gradient of the outputs. The scores of only one head
    are in memory at a time, since those of all heads would fill a GPU.
    """
    *inputs, gradient = (tensor.detach().double() for tensor in packed)
    outputs, *totals = (torch.zeros_like(tensor) for tensor in (gradient, *inputs))
    every_query, every_key, every_value = (tensor.requires_grad_() for tensor in inputs)
    for head in range(kind.heads):
        group = head * kind.groups // kind.heads
        sink = None if sinks is None else sinks[head].detach().double()
        parts = []
        for queries, keys in paths:
            query = every_query[queries.start : queries.stop, head]
            key = every_key[keys, group]
            value = every_value[keys, group]
            scores = query @ key.T * kind.scale
            # If there are more keys than queries, the queries align with the last keys.
            num_before = len(key) - len(query)
            seen = torch.ones_like(scores, dtype=torch.bool).tril(num_before)
            if kind.window:
                seen &= seen.triu(num_before + 1 - kind.window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sink is not None:
                scores = torch.cat([scores, sink.expand(len(scores), 1)], dim=-1)
            parts.append(scores.softmax(-1)[:, : len(key)] @ value)
        output = torch.cat(parts)
        outputs[:, head] = output.detach()
        gradients = torch.autograd.grad(output, inputs, gradient[:, head])
        for total, of_head in zip(totals, gradients, strict=True):
            total += of_head
    return [outputs, *totals]
