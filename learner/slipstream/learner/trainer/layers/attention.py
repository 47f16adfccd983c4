"""Attention without TransformerEngine: packed sequences, torch's own kernel, context parallelism.

Attention with sinks is computed here on every device. A sink is a learnt score without a value, and
TransformerEngine 2.11 has no kernel with sinks for packed sequences (`get_attention_backend` in its
`dot_product_attention/utils.py`).

torch's kernel is called once for each group of sequences with similar lengths. The mask of a long
sequence would take gigabytes, so its queries are cut into blocks, whose masks are made when needed.

Here are also Megatron's parameters of packed sequences, extended by replayed experts, padding and
shared prefixes. The classes inherit from Megatron's, so import this module only after
`compat.install`.
"""

import functools
import importlib
import itertools
import logging
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.training_sequence import (
    Paths,
    gathered_places,
    with_tensors,
    zigzag,
)
from slipstream.learner.trainer.layers import own_device
from slipstream.learner.trainer.layers.norms import SplitByHeads
from torch import Tensor
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)
_DECISION = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
_KINDS = {
    "use_flash_attention": "flash attention",
    "use_fused_attention": "fused attention (cuDNN)",
    "use_unfused_attention": "unfused attention",
}
# Most queries times keys of one call with a mask; more are cut into blocks of queries. A mask of
# this many scores takes 32 MiB, or 128 MiB if a kernel needs it in float32.
MOST_SCORES = 1 << 25


class CoreAttention(SplitByHeads):
    """Causal attention of packed [tokens, heads, dim]."""

    split = "softmax_offset"

    def __init__(
        self,
        config: Megatron,
        layer_number: int,
        attn_mask_type: Megatron,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Megatron = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup = pg_collection.cp
        # Number of tokens before a query that the query sees; None for all of them.
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0]
        # Sink of each head: a learnt score without a value. None if there are no sinks.
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = new_scores(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Megatron = None,
        **_: object,
    ) -> Tensor:
        """Returns the attention output, [tokens, heads * dim].

        Where `cu_seqlens_kv` differs from `cu_seqlens_q`, a sequence has more keys than queries:
        its queries align with its last keys. Under context parallelism the packed tokens are this
        rank's, and `cu_seqlens_q` gives the bounds of the whole sequences; the call is then
        collective over the context parallel group.
        """
        assert packed_seq_params is not None, "the trainer packs all sequences"
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        size = self.cp_group.size()
        key_bounds: tuple[int, ...] | None = None
        if packed_seq_params.cu_seqlens_kv is not packed_seq_params.cu_seqlens_q:
            assert size == 1, "shared prefixes are not split over ranks"
            assert self.window is None, "shared prefixes have no windows"
            key_bounds = tuple(packed_seq_params.cu_seqlens_kv.tolist())
        elif size > 1:
            key, value = (
                gather_from_sequence_parallel_region(part, group=self.cp_group)
                for part in (key, value)
            )
        split = (self.cp_group.rank(), size)
        groups, order = length_groups(bounds, query.device, key_bounds, split, self.window)

        def attended(query: Tensor, key: Tensor, value: Tensor, group: LengthGroup) -> Tensor:
            # [sequences, heads, length, dim]: trailing padding has no effect. Without a mask,
            # queries and keys belong to the same tokens and attention is causal.
            query = rows(query, group.queries).transpose(1, 2)
            key, value = (rows(part, group.keys).transpose(1, 2) for part in (key, value))
            mask = group.seen()
            scale = self.softmax_scale
            if self.softmax_offset is not None:
                output = attend(query, key, value, mask, scores=self.softmax_offset, scale=scale)
            else:
                output = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scale,
                    enable_gqa=key.shape[1] != query.shape[1],
                )
            return output.transpose(1, 2)[group.is_query]

        # Activations of all blocks would not fit: the backward pass recomputes each block.
        again = functools.partial(
            checkpoint, attended, use_reentrant=False, preserve_rng_state=False
        )
        parts = [
            (attended if group.offset is None else again)(query, key, value, group)
            for group in groups
        ]
        return torch.cat(parts).index_select(0, order).flatten(1)


def make_whole_vectors(chunks: list[Megatron]) -> list[Megatron]:
    """Makes latent attention gather the weights of its down projections instead of their outputs.

    Sequence parallelism must split the tokens. Returns `chunks`.
    """

    def whole_vectors(matrix: Megatron, tokens: Tensor) -> tuple[Tensor, None]:
        weight = gather_from_sequence_parallel_region(matrix.weight, group=matrix.tp_group)
        return F.linear(tokens, weight), None

    for chunk in chunks:
        for layer in chunk.decoder.layers:
            for name in ("linear_q_down_proj", "linear_kv_down_proj"):
                matrix = getattr(layer.self_attention, name, None)
                if matrix is not None:
                    matrix.forward = types.MethodType(whole_vectors, matrix)
    return chunks


def new_scores(config: Megatron) -> torch.nn.Parameter:
    """Returns a parameter for the sink scores of this rank's heads, NaN until it is loaded."""
    num_heads = config.num_attention_heads // config.tensor_model_parallel_size
    # NaN reveals scores that were not loaded.
    scores = torch.nn.Parameter(
        torch.full(
            (num_heads,),
            torch.nan,
            dtype=config.params_dtype,
            device=own_device(config),
        )
    )
    # The gradient norm counts the scores of all ranks.
    scores.tensor_model_parallel = True  # type: ignore[attr-defined]
    return scores


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scores: Tensor,
    scale: float,
) -> Tensor:
    """Computes attention over dim 2 of [sequences, heads, length, dim], with a sink per query head.

    The sink is an extra first key. Its scores come from extra head dimensions, two for each query
    head that shares the key head; these dimensions are 0 in all other keys. So torch's fast kernels
    compute attention with sinks without storing the scores. `scores` has the sink of each query
    head. Without a mask attention is causal, and a dummy query precedes the others.
    """
    is_causal = mask is None
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    length, dim = query.shape[2:]
    groups = key.shape[1]
    per_group = query.shape[1] // groups
    # Two dimensions for each: 1 / scale may have more digits than the element type.
    large = torch.tensor(1.0 / scale, dtype=query.dtype, device=query.device)
    small = (1.0 / scale - large.double()).to(query.dtype)
    columns = torch.eye(per_group, dtype=query.dtype, device=query.device).repeat(groups, 1)
    columns = torch.cat([columns * large, columns * small], dim=-1)[None, :, None]
    query = torch.cat(
        [
            query,
            columns.expand(
                len(query),
                -1,
                length,
                -1,
            ),
        ],
        dim=-1,
    )
    by_group = (
        scores.to(key.dtype)
        .view(1, groups, 1, per_group)
        .expand(
            len(key),
            -1,
            -1,
            -1,
        )
    )
    sink = torch.cat(
        [
            by_group.new_zeros(
                len(key),
                groups,
                1,
                dim,
            ),
            by_group,
            by_group,
        ],
        dim=-1,
    )
    key = torch.cat([sink, F.pad(key, (0, 2 * per_group))], dim=2)
    value = F.pad(value, (0, 2 * per_group, 1, 0))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=per_group > 1,
    )[..., :dim]
    return output[:, :, 1:] if is_causal else output


@dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """Packed-sequence parameters with what layers need to know of the tokens.

    Megatron passes this object to every layer, also when it recomputes the layer, so that each
    router gets the experts of the current micro batch.
    """

    # Same as `MicroBatch.expert_ids`; None if the routers choose.
    expert_ids: Tensor | None = None
    # Same as `MicroBatch.is_padding`.
    is_padding: Tensor | None = None
    # The row of each token in the rotary angles; None where Megatron finds it by the bounds.
    positions: Tensor | None = None


@dataclass
class SharedSequences(RoutedSequences):
    """Packed-sequence parameters of a micro batch whose sequences share prefixes.

    Megatron's own fields describe the micro batch as one sequence; `PrefixSharing` gives each token
    the rotary angles of its position. The bounds of the segments are in `bounds` and `paths`.
    """

    bounds: Tensor | None = None
    max_queries: int = 0
    paths: Paths | None = None


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int, cp_size: int) -> Megatron:
    """Returns Megatron's parameters of packed sequences; the arguments are as in `MicroBatch`."""
    packed = RoutedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    if cp_size > 1:
        # TransformerEngine requires these fields; trailing padding needs no mask of its own. They
        # are the same tensor as `cu_seqlens_q`, so that TransformerEngine knows, without a wait for
        # the device, that there are no gaps between sequences.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = cu_seqlens
    return packed


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length, or a block of one sequence, for one call of the kernel."""

    # [sequences, longest]: indices of this rank's tokens, and which of them are not padding.
    queries: Tensor
    is_query: Tensor
    # [sequences, longest]: indices of all tokens of each sequence.
    keys: Tensor
    # [sequences, 1, queries, keys]: which keys a query sees; None for causal attention.
    mask: Tensor | None
    # A block has no mask, but the tokens from its first key to its first query, and the window.
    offset: int | None = None
    window: int | None = None

    def seen(self) -> Tensor | None:
        """Returns the mask; that of a block is made at each call."""
        if self.offset is None:
            return self.mask
        device = self.keys.device
        queries = torch.arange(self.queries.shape[1], device=device)[:, None] + self.offset
        keys = torch.arange(self.keys.shape[1], device=device)
        mask = keys <= queries
        if self.window is not None:
            mask &= keys >= queries - self.window
        return mask[None, None]


# The groups, and for each of this rank's tokens its index in the groups' concatenated queries.
Groups = tuple[list[LengthGroup], Tensor]


def rows(tokens: Tensor, places: Tensor) -> Tensor:
    """Returns `tokens` at the indices `places` [sequences, length], as [sequences, length, ...]."""
    return tokens.index_select(0, places.flatten()).view(*places.shape, *tokens.shape[1:])


def mixed_in_rows(mix: Callable[..., Tensor], tokens: Sequence[Tensor], packed: Megatron) -> Tensor:
    """Applies `mix` to packed `tokens` laid out as [sequences, length, ...]; packs the results.

    Each sequence must be whole on this rank. Trailing padding must have no effect on `mix`.
    """
    assert packed is not None, "only packed sequences are laid out in rows"
    bounds = tuple(packed.cu_seqlens_q.tolist())
    groups, order = length_groups(bounds, tokens[0].device)
    parts = [
        mix(*(rows(tensor, group.queries) for tensor in tokens))[group.is_query] for group in groups
    ]
    return torch.cat(parts).index_select(0, order)


def _seen(queries: Tensor, keys: Tensor, is_key: Tensor, window: int | None) -> Tensor:
    """Returns which keys each query sees, [sequences, 1, queries, keys]; none sees padding."""
    distance = queries[:, :, None] - keys[:, None]
    mask = (distance >= 0) & is_key[:, None]
    if window is not None:
        mask &= distance <= window
    return mask[:, None]


# The cache holds separate groups for layers with and without a window.
@functools.lru_cache(maxsize=32)
def length_groups(
    bounds: tuple[int, ...],
    device: torch.device,
    key_bounds: tuple[int, ...] | None = None,
    split: tuple[int, int] = (0, 1),
    window: int | None = None,
) -> Groups:
    """Groups sequences of similar length, so that few kernel calls with little padding suffice.

    `bounds` has the start of each sequence, and the end of the last. Sequences whose masks would be
    too large are cut into blocks. With `key_bounds`, the same for keys, the queries of a sequence
    are its last tokens: query i of n sees all keys but the last n - 1 - i, and nothing is cut.
    `split` is this rank's index among the context parallel ranks, and their number. `window` is the
    number of tokens before a query that the query sees; None for all of them.
    """
    rank, size = split
    # The starts and ends of a sequence's queries and keys, by the classes of both lengths.
    by_class: dict[tuple[int, ...], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    key_spans = itertools.pairwise(key_bounds or bounds)
    for pair in zip(itertools.pairwise(bounds), key_spans, strict=True):
        if pair[0][1] > pair[0][0]:
            kind = tuple((end - start - 1).bit_length() for start, end in pair)
            by_class.setdefault(kind, []).append(pair)
    groups: list[LengthGroup] = []
    for members in by_class.values():
        longest = max(end - start for (start, end), _ in members)
        is_plain = size == 1 and (window is None or longest <= window + 1)
        if not is_plain and len(members) * longest * longest // size > MOST_SCORES:
            for span, _ in members:
                groups += _blocks(span, bounds, device, split, window)
            continue
        query_places, is_own = _places(
            [(start // size, end // size) for (start, end), _ in members]
        )
        keys, is_key = _places([span for _, span in members])
        mask = None
        if not is_plain or key_bounds is not None:
            # The distance from a query's place to that of its own key.
            shifts = torch.tensor([[of_keys[1] - of_own[1]] for of_own, of_keys in members])
            queries = zigzag(bounds, rank, size)[query_places] + shifts
            mask = _seen(queries, keys, is_key, window)
        if size > 1:
            keys = gathered_places(bounds, size)[keys]
        groups.append(LengthGroup(query_places, is_own, keys, mask))
    order = torch.cat([group.queries[group.is_query] for group in groups]).argsort()
    placed = [with_tensors(group, lambda tensor: tensor.to(device)) for group in groups]
    return placed, order.to(device)


def _blocks(
    member: tuple[int, int],
    bounds: tuple[int, ...],
    device: torch.device,
    split: tuple[int, int],
    window: int | None,
) -> list[LengthGroup]:
    """Returns consecutive queries of the sequence `member` in blocks, with the keys they see."""
    (start, end), (rank, size) = member, split
    # All blocks are views of the same places.
    keys = gathered_places(bounds, size)[start:end].to(device)[None]
    queries = torch.arange(start // size, end // size)[None]
    length = queries.shape[1]
    chunk = length // 2 if size > 1 else length
    # Places in the sequence at which this rank's two chunks begin.
    firsts = (rank * chunk, (2 * size - 1 - rank) * chunk) if size > 1 else (0,)
    step = max(1, MOST_SCORES // (end - start))
    groups = []
    for number, first in enumerate(firsts):
        for done in range(0, chunk, step):
            count = min(step, chunk - done)
            at = first + done
            first_key = 0 if window is None else max(0, at - window)
            block = queries[:, number * chunk + done :][:, :count]
            seen = keys[:, first_key : at + count]
            is_query = torch.ones_like(block, dtype=torch.bool)
            groups.append(LengthGroup(block, is_query, seen, None, at - first_key, window))
    return groups


def _places(members: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns each member's positions, padded with its last, and a mask: [members, longest]."""
    starts, ends = torch.tensor(members).unbind(1)
    places = starts[:, None] + torch.arange(int((ends - starts).max()))
    return torch.minimum(places, ends[:, None] - 1), places < ends[:, None]


@functools.cache
def log_attention_once() -> None:
    """Logs the attention kernel once in a process; call this after the first forward pass."""
    logger.info("attention: %s", chosen_attention())


def chosen_attention() -> str:
    """Returns one line about the last call of attention: kernel, layout and element type."""
    if _DECISION not in sys.modules:
        return "torch's scaled_dot_product_attention"
    backends = vars(sys.modules[_DECISION])["_attention_backends"]
    kinds = [name for key, name in _KINDS.items() if backends[key]]
    parameters = backends["attention_params"]
    text = " and ".join(kinds) or "none"
    if parameters is None:
        return text
    text += f", {parameters.qkv_layout} {str(parameters.qkv_dtype).removeprefix('torch.')}"
    if parameters.context_parallel:
        text += f", sequences split over ranks by {parameters.cp_comm_type}"
    return text + (", deterministic" if parameters.deterministic else "")


def kernel_and_remedy(*, of_torch: bool) -> tuple[str, str]:
    """Returns the last call's kernel, torch's own with `of_torch`, and a change that avoids it."""
    if of_torch:
        return f"torch {torch.__version__}", "another version of torch"
    kernel = chosen_attention()
    if kernel.startswith(_KINDS["use_unfused_attention"]):
        return kernel, "another version of TransformerEngine"
    if "cuDNN" not in kernel:
        return kernel, "NVTE_FLASH_ATTN=0 in the environment of the trainer"
    utils = importlib.import_module("transformer_engine.pytorch.utils")
    version = ".".join(map(str, utils.get_cudnn_version()))
    newer = "a newer cuDNN (in CUDNN_HOME), or NVTE_FUSED_ATTN=0 in the environment of the trainer"
    return f"{kernel}, cuDNN {version}", newer
