"""A learner's forward pass of a dense Qwen3 or Llama model, with kernels to choose.

`TorchKernels` are torch's own, as a learner has them without vLLM. `EngineKernels` are those that
vLLM's layers call, in the same order and with the same fused matrices, each with an ordinary
backward pass. A step of a learner in the same bits as the engine could be made of these.

vLLM's kernels are imported where they are used, since the two builds have different ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens whose logits are alive at a time.
CHUNK = 2048
# Tokens of a page of keys, on GPUs and on CPUs.
PAGE, CPU_PAGE = 16, 128
# Rows of each product on CPUs: how a row is added up depends on the number of rows.
ROWS = 16


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model that the forward pass needs."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    eps: float
    theta: float
    max_positions: int


@dataclass(frozen=True)
class Packed:
    """Tokens of sequences behind each other."""

    tokens: Tensor
    positions: Tensor
    # Where each sequence begins, and the last one's end; int32.
    bounds: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, sequences: list[list[int]], device: torch.device) -> Packed:
        """Packs `sequences`."""
        lengths = [len(one) for one in sequences]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        flat = torch.tensor([token for one in sequences for token in one])
        return cls(flat.to(device), positions.to(device), ends.to(device), lengths)


def load(folder: Path, device: torch.device) -> tuple[dict[str, Tensor], Sizes]:
    """Returns the weights of a folder with vLLM's fused matrices, and its sizes."""
    from safetensors.torch import load_file

    table = json.loads((folder / "config.json").read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file, device=str(device))
    sizes = Sizes(
        table["num_hidden_layers"],
        table["num_attention_heads"],
        table["num_key_value_heads"],
        table.get("head_dim") or table["hidden_size"] // table["num_attention_heads"],
        table["rms_norm_eps"],
        table.get("rope_parameters", table)["rope_theta"],
        table["max_position_embeddings"],
    )
    for layer in range(sizes.layers):
        own = f"model.layers.{layer}."
        parts = [found.pop(f"{own}self_attn.{name}_proj.weight") for name in "qkv"]
        found[f"{own}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [found.pop(f"{own}mlp.{name}_proj.weight") for name in ("gate", "up")]
        found[f"{own}mlp.gate_up_proj.weight"] = torch.cat(parts)
    return found, sizes


def head(weights: dict[str, Tensor]) -> Tensor:
    """Returns the projection to the vocabulary, which may be that of the tokens."""
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


Note = Callable[[str, int, Tensor], None]


def forward(
    weights: dict[str, Tensor], sizes: Sizes, kernels: TorchKernels, packed: Packed, note: Note
) -> Tensor:
    """Returns the last hidden states; calls `note` with name, layer and output of each part."""
    width = sizes.head_dim
    cuts = [sizes.heads * width, sizes.groups * width, sizes.groups * width]
    residual = F.embedding(packed.tokens, weights["model.embed_tokens.weight"])
    states: Tensor | None = None
    for layer in range(sizes.layers):
        own = f"model.layers.{layer}."

        def product(x: Tensor, name: str, own: str = own, layer: int = layer) -> Tensor:
            found = kernels.linear(x, weights[f"{own}{name}.weight"])
            note(name.rpartition(".")[2], layer, found)
            return found

        def norm(
            x: Tensor, name: str, added: Tensor | None, own: str = own, layer: int = layer
        ) -> tuple[Tensor, Tensor]:
            found, total = kernels.norm(x, added, weights[f"{own}{name}.weight"], sizes.eps)
            note(name.rpartition(".")[2], layer, found)
            return found, total

        x, residual = norm(residual, "input_layernorm", states)
        query, key, value = product(x, "self_attn.qkv_proj").split(cuts, dim=-1)
        query, key = (x.unflatten(-1, (-1, width)) for x in (query, key))
        if f"{own}self_attn.q_norm.weight" in weights:
            query, _ = norm(query, "self_attn.q_norm", None)
            key, _ = norm(key, "self_attn.k_norm", None)
        query, key = kernels.rotate(packed.positions, query, key)
        note("rotary_emb", layer, torch.cat([query.flatten(1), key.flatten(1)], dim=-1))
        attended = kernels.attend(query, key, value.unflatten(-1, (-1, width)), packed).flatten(1)
        note("attn", layer, attended)
        states = product(attended, "self_attn.o_proj")
        x, residual = norm(residual, "post_attention_layernorm", states)
        x = kernels.activate(product(x, "mlp.gate_up_proj"))
        note("act_fn", layer, x)
        states = product(x, "mlp.down_proj")
    found, _ = kernels.norm(residual, states, weights["model.norm.weight"], sizes.eps)
    note("norm", sizes.layers, found)
    return found


class TorchKernels:
    """Torch's operations, as the learner's layers on CPUs call them."""

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device, head: torch.dtype
    ) -> None:
        """`head` is the element type of the logits."""
        self.sizes, self.head = sizes, head
        with torch.device(device):
            steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.float) / sizes.head_dim
            angles = torch.einsum(
                "i,j->ij",
                torch.arange(sizes.max_positions, dtype=torch.float),
                1.0 / (sizes.theta**steps),
            )
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the product with a matrix."""
        return F.linear(x, weight)

    def norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns the normalised sum of `x` and `added`, and the sum."""
        total = x if added is None else x + added
        return F.rms_norm(total, weight.shape, weight, eps), total

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries and keys of [tokens, heads, dim], turned by their positions."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        return turned(query), turned(key)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
        """Returns causal attention of [tokens, heads, dim], sequence by sequence."""
        parts = [x.split(packed.lengths) for x in (query, key, value)]
        found = []
        for own in zip(*parts, strict=True):
            turned = [x.transpose(0, 1).unsqueeze(0) for x in own]
            out = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
            found.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(found)

    def activate(self, x: Tensor) -> Tensor:
        """Returns the gated half of each row."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """Returns the logits of hidden states."""
        if self.head == x.dtype:
            return self.linear(x, head)
        if x.is_cuda:
            return torch.mm(x, head.t(), out_dtype=self.head)
        return F.linear(x.to(self.head), head.to(self.head))

    def token_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probabilities of `targets`."""
        return logits.float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)

    def logprobs(self, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probabilities of `targets` behind `hidden`."""
        return _Logprobs.apply(hidden, head, targets, self)  # type: ignore[no-any-return,no-untyped-call]


class _Logprobs(torch.autograd.Function):
    """Holds the logits of one chunk at a time; the backward pass computes them again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, kernels: Any) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(hidden, head, targets)
        ctx.kernels = kernels
        pairs = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat([kernels.token_logprobs(kernels.logits(x, head), t) for x, t in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        hidden, head, targets = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(head, dtype=torch.float32)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            slopes = -ctx.kernels.logits(hidden[rows], head).float().softmax(-1)
            slopes.scatter_add_(-1, targets[rows, None], slopes.new_ones(len(slopes), 1)).mul_(
                grads[0][rows, None]
            )
            small = slopes.to(head.dtype)
            hidden_grad[rows] = small @ head
            head_grad += small.t() @ hidden[rows]
        return hidden_grad, head_grad.to(head.dtype), None, None


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: Any) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        found: Tensor = kernel(x, weight)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, None


class _Recomputed(torch.autograd.Function):
    """Has the values of `kernel` and the gradients of `reference`, which is torch's own."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, reference: Any, *inputs: Tensor) -> Any:  # noqa: ANN401
        ctx.save_for_backward(*inputs)
        ctx.reference = reference
        with torch.no_grad():
            return kernel(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.reference(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return None, None, *torch.autograd.grad(outputs, inputs, grads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: Packed,
        kernel: Any,  # noqa: ANN401
    ) -> Tensor:
        out, totals = kernel(query, key, value, packed)
        ctx.save_for_backward(query, key, value, out, totals)
        ctx.packed = packed
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, out, totals = ctx.saved_tensors
        longest, bounds = max(ctx.packed.lengths), ctx.packed.bounds
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            query,
            key,
            value.contiguous(),
            out,
            totals,
            bounds,
            bounds,
            longest,
            longest,
            0.0,
            True,
            unused,
            unused[0],
            scale=1.0 / math.sqrt(query.shape[-1]),
        )
        return *found, None, None


class EngineKernels(TorchKernels):
    """The kernels of vLLM's layers on GPUs, batch-invariant where vLLM was told so."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        head: torch.dtype,
        *,
        paged: bool = False,
        flash_backward: bool = True,
    ) -> None:
        """With `paged`, attention reads keys from pages as the engine does, without gradients."""
        super().__init__(sizes, dtype, device, head)
        from vllm import _custom_ops
        from vllm.model_executor.determinism import batch_invariant
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        self._ops, self._invariant = _custom_ops, batch_invariant
        self._flash, self._version = flash_attn_varlen_func, get_flash_attn_version()
        self._score = compute_token_logprobs
        self._paged, self._flash_backward = paged, flash_backward

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `TorchKernels`."""
        return _Matrix.apply(x, weight, self._invariant.linear_batch_invariant)  # type: ignore[no-any-return,no-untyped-call]

    def norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `TorchKernels`. vLLM has one kernel for a sum's norm and another for the others."""
        total = x if added is None else x + added

        def kernel(total: Tensor, weight: Tensor) -> Tensor:
            if added is None:
                found: Tensor = self._invariant.rms_norm_batch_invariant(total, weight, eps)
                return found
            # The sum is already rounded as that kernel rounds it.
            out = total.clone()
            self._ops.fused_add_rms_norm(out, torch.zeros_like(total), weight, eps)
            return out

        def reference(total: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(total, weight.shape, weight, eps)

        return _Recomputed.apply(kernel, reference, total, weight), total  # type: ignore[no-untyped-call]

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """See `TorchKernels`."""

        def kernel(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            found = [x.flatten(1).clone() for x in (query, key)]
            self._ops.rotary_embedding(positions, *found, self.sizes.head_dim, self.table, True)
            return found[0].view(query.shape), found[1].view(key.shape)

        def reference(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return TorchKernels.rotate(self, positions, query, key)

        return _Recomputed.apply(kernel, reference, query, key)  # type: ignore[no-any-return,no-untyped-call]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
        """See `TorchKernels`; one kernel for all sequences."""
        if self._paged:
            return self._attend_paged(query, key, value, packed)
        if self._flash_backward:
            return _Attention.apply(query, key, value, packed, self._attend_plain)  # type: ignore[no-any-return,no-untyped-call]

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend_plain(query, key, value, packed)[0]

        def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return TorchKernels.attend(self, query, key, value, packed)

        return _Recomputed.apply(kernel, reference, query, key, value)  # type: ignore[no-any-return,no-untyped-call]

    def _attend_plain(
        self, query: Tensor, key: Tensor, value: Tensor, packed: Packed
    ) -> tuple[Tensor, Tensor]:
        longest = max(packed.lengths)
        out, totals = self._flash(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=longest,
            cu_seqlens_q=packed.bounds,
            max_seqlen_k=longest,
            cu_seqlens_k=packed.bounds,
            softmax_scale=self.sizes.head_dim**-0.5,
            causal=True,
            fa_version=self._version,
            num_splits=1,
            return_softmax_lse=True,
        )
        return out, totals

    def _attend_paged(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
        counts = [-(-length // PAGE) for length in packed.lengths]
        pages = torch.zeros(
            2, sum(counts), PAGE, *key.shape[1:], dtype=key.dtype, device=key.device
        )
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=key.device)
        begin = first = 0
        for row, (length, count) in enumerate(zip(packed.lengths, counts, strict=True)):
            for place, source in enumerate((key, value)):
                pages[place, first : first + count].flatten(0, 1)[:length] = source[
                    begin : begin + length
                ]
            table[row, :count] = torch.arange(first, first + count)
            begin, first = begin + length, first + count
        longest = max(packed.lengths)
        found: Tensor = self._flash(
            q=query,
            k=pages[0],
            v=pages[1],
            max_seqlen_q=longest,
            cu_seqlens_q=packed.bounds,
            max_seqlen_k=longest,
            seqused_k=torch.tensor(packed.lengths, dtype=torch.int32, device=key.device),
            block_table=table,
            softmax_scale=self.sizes.head_dim**-0.5,
            causal=True,
            fa_version=self._version,
            num_splits=1,
        )
        return found

    def activate(self, x: Tensor) -> Tensor:
        """See `TorchKernels`."""

        def kernel(x: Tensor) -> Tensor:
            out = x.new_empty(len(x), x.shape[1] // 2)
            torch.ops._C.silu_and_mul(out, x)
            return out

        return _Recomputed.apply(kernel, lambda x: TorchKernels.activate(self, x), x)  # type: ignore[no-any-return,no-untyped-call]

    def token_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """See `TorchKernels`."""
        found: Tensor = self._score(logits, targets[:, None])
        return found.squeeze(-1)


def fixed_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the product with a matrix, in blocks of ROWS rows."""
    padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
    return torch.cat([F.linear(rows, weight) for rows in padded.split(ROWS)])[: len(x)]


class CpuKernels(TorchKernels):
    """The kernels of vLLM's layers on CPUs, with products in blocks of a fixed number of rows."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `TorchKernels`."""
        return _Matrix.apply(x, weight, fixed_rows)  # type: ignore[no-any-return,no-untyped-call]

    def norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `TorchKernels`. vLLM normalises the sum before it is rounded."""
        total = x.float() if added is None else x.float() + added.float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
        return (total * scale).to(x.dtype) * weight, total.to(x.dtype)

    def rotate(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """See `TorchKernels`."""
        from vllm import _custom_ops

        def kernel(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            found = [x.flatten(1).clone() for x in (query, key)]
            width = self.sizes.head_dim
            _custom_ops.rotary_embedding(positions, *found, width, self.table, True)
            return found[0].view(query.shape), found[1].view(key.shape)

        def reference(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            return TorchKernels.rotate(self, positions, query, key)

        return _Recomputed.apply(kernel, reference, query, key)  # type: ignore[no-any-return,no-untyped-call]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
        """See `TorchKernels`."""

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(query, key, value, packed)

        def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return TorchKernels.attend(self, query, key, value, packed)

        return _Recomputed.apply(kernel, reference, query, key, value)  # type: ignore[no-any-return,no-untyped-call]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: Packed) -> Tensor:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        heads, (groups, width) = query.shape[1], key.shape[1:]
        counts = [-(-length // CPU_PAGE) for length in packed.lengths]
        pages = torch.zeros(sum(counts), groups, 2 * CPU_PAGE, width, dtype=key.dtype)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        slots, first = [], 0
        for row, (length, count) in enumerate(zip(packed.lengths, counts, strict=True)):
            table[row, :count] = torch.arange(first, first + count)
            slots.append(first * CPU_PAGE + torch.arange(length))
            first += count
        keys, values = pages.chunk(2, dim=2)
        isa = _get_attn_isa(key.dtype, CPU_PAGE, width)
        ops.cpu_attn_reshape_and_cache(
            key.contiguous(), value.contiguous(), keys, values, torch.cat(slots), isa
        )
        lengths = torch.tensor(packed.lengths, dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(counts),
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=width,
            seq_lens=lengths,
            dtype=key.dtype,
            query_start_loc=packed.bounds,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        out = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=packed.bounds,
            seq_lens=lengths,
            scale=width**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out

    def logits(self, x: Tensor, head: Tensor) -> Tensor:
        """See `TorchKernels`."""
        return fixed_rows(x.to(self.head), head.to(self.head))
