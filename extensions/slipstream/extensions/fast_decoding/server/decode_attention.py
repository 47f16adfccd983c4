# ruff: noqa: ANN001, ANN202 - Triton compiles the kernel from the types of its arguments
"""vLLM's FlashAttention, but for steps in which each request adds one token: a kernel of ours.

Consumes: queries, vLLM's paged cache. Produces: attention's output, rounded as FlashAttention does.

Such a step reads the whole cache once and computes little: FlashAttention 3, made for many queries,
reads at 0.6 of the memory's bandwidth (vLLM 0.32.0, H200). `engine_arguments` has vLLM build this
backend wherever it would build FlashAttention's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

# Tokens of a context that are read at a time, and how many such reads are under way.
_TOKENS = 128
_STAGES = 2
_WARPS = 4
# A program reads a request's context for one head of keys. Fewer programs than these leave much of
# a GPU idle, unless they are short: FlashAttention cuts long contexts into parts.
_FEWEST_PROGRAMS = 512
_SHORT_CONTEXT = 1536
# Tensor cores multiply 16 rows at least.
_ROWS = 16


class DecodeBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's backend with our implementation of its forward pass."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return DecodeImpl


class DecodeImpl(FlashAttentionImpl):  # type: ignore[misc]
    """FlashAttention, but for the steps that `decode` computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **kwargs)
        self._is_plain = (
            self.attn_type == AttentionType.DECODER
            and self.head_size in (64, 128, 256)
            and self.num_queries_per_kv <= _ROWS
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
            and self.dcp_world_size == 1
            and not is_quantized_kv_cache(self.kv_cache_dtype)
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention's result into `output`; see vLLM's method of this name."""
        if (
            self._is_plain
            and attn_metadata is not None
            and attn_metadata.max_query_len == 1
            and attn_metadata.rswa_prefix_lens is None
            and (
                attn_metadata.max_seq_len <= _SHORT_CONTEXT
                or len(attn_metadata.seq_lens) * self.num_kv_heads >= _FEWEST_PROGRAMS
            )
        ):
            lengths = attn_metadata.seq_lens
            table = attn_metadata.block_table
            decode(query, kv_cache, table, lengths, self.scale, output)
            return output
        more = (output_scale, output_block_scale)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *more)
        return output


def decode(
    queries: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Writes the attention of one query for each request into `output`.

    `queries` and `output` are [tokens, heads, size]; row i belongs to request i. `cache` is
    [blocks, heads of keys, tokens of a block, 2 * size]: a token's key and then its value. `table`
    is [requests, blocks of the longest] and says where a context lies; `lengths` is [requests], the
    tokens of each context. A context without tokens gives zeros.
    """
    heads, size = queries.shape[1:]
    num_groups = cache.shape[1]
    _decode_kernel[num_groups, len(lengths)](
        queries,
        cache,
        table,
        lengths,
        output,
        queries.stride(0),
        queries.stride(1),
        output.stride(0),
        output.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        table.stride(0),
        # Exponentials are to the base 2.
        scale * 1.4426950408889634,
        GROUP=heads // num_groups,
        ROWS=_ROWS,
        SIZE=size,
        BLOCK=cache.shape[2],
        TOKENS=_TOKENS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    queries,
    cache,
    table,
    lengths,
    output,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Computes the heads of queries that share one head of keys, for one request."""
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + request)
    places = tl.arange(0, SIZE)
    rows = tl.arange(0, ROWS)
    heads = head * GROUP + rows
    is_head = (rows < GROUP)[:, None]
    query = tl.load(
        queries + request * query_stride + heads[:, None] * query_head_stride + places[None, :],
        mask=is_head,
        other=0.0,
    )
    cache += head * head_stride
    table += request * table_stride
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, length, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        is_token = tokens < length
        block = tl.load(table + tokens // BLOCK, mask=is_token, other=0).to(tl.int64)
        base = block * block_stride + (tokens % BLOCK) * token_stride
        key = tl.load(cache + base[None, :] + places[:, None])
        # Elsewhere may lie what is no number, and nothing times that is none either.
        value = tl.load(
            cache + base[:, None] + SIZE + places[None, :], mask=is_token[:, None], other=0.0
        )
        scores = tl.where(is_token[None, :], tl.dot(query, key) * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - top)
        weights = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        peak = top
    # A row of a CUDA graph that no request fills has a context without tokens.
    result = tl.where(length > 0, result / total[:, None], 0.0)
    tl.store(
        output + request * output_stride + heads[:, None] * output_head_stride + places[None, :],
        result.to(output.dtype.element_ty),
        mask=is_head,
    )
