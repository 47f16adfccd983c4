"""Megatron's layers with the kernels of vLLM's, whose results equal the engine's in every bit.

This is the only module of the trainer that imports vLLM, for `algorithm.agreement = "bits"`. The
forward pass of each function gives exactly the engine's result, whatever else is in the batch. The
backward pass gives the gradients of torch's own operations. The classes inherit from Megatron's, so
import this module only after `compat.install`.
"""

import copy
import functools
import importlib
import os
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from slipstream.core.settings.config import Config
from slipstream.extensions.engine_bits import row_kernels
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import mlp_parts
from slipstream.learner.trainer.layers.attention import CoreAttention
from slipstream.learner.trainer.layers.norms import RMSNorm
from slipstream.learner.trainer.model.model_part import ModelPart
from torch import Tensor

# Tokens of a page of keys on CPUs, as in vLLM.
_PAGE = 128
Output = tuple[Tensor, Tensor | None]


class EngineKernels:
    """The engine's kernels without gradients: those of CPUs, and in `_GpuKernels` those of GPUs."""

    def __init__(self) -> None:
        # The engine's kernels compute with AMX where a CPU has it, and a process must ask for that.
        torch.cpu._init_amx()
        from vllm import _custom_ops

        self._ops = _custom_ops

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x` [..., in] times `weight` [out, in], plus the bias."""
        return row_kernels.product(x, weight, bias)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        is_sum: bool,
    ) -> Tensor:
        """Returns the RMS norm of `x` over its last dimension, multiplied by `weight`.

        `is_sum` tells whether `x` comes from a residual addition.
        """
        return row_kernels.norm(x, weight, eps)

    def rotate(self, positions: Tensor, x: Tensor, table: Tensor) -> Tensor:
        """Returns `x` [tokens, heads, dim] rotated by RoPE.

        `table` has cosines and sines, [positions, dim]. Dimension i pairs with i + dim / 2.
        """
        rotated = x.flatten(1).contiguous().clone()
        self._ops.rotary_embedding(positions, rotated, None, x.shape[-1], table, True)
        return rotated.view(x.shape)

    def gate(self, x: Tensor) -> Tensor:
        """Returns SiLU of the first half of each row, times the second half."""
        return _gated(x)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
    ) -> Output:
        """Returns causal attention of [tokens, heads, dim], and the log-sum-exp of its scores.

        `bounds`, int32, has the start of each sequence, and the end of the last. On CPUs the
        log-sum-exp is None.
        """
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # vLLM's kernel reads keys and values in pages.
        heads, (groups, width) = query.shape[1], key.shape[1:]
        lengths = bounds.diff()
        counts = (lengths + _PAGE - 1) // _PAGE
        firsts = counts.cumsum(0) - counts
        pages = torch.zeros(
            int(counts.sum()),
            groups,
            2 * _PAGE,
            width,
            dtype=key.dtype,
        )
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        slots = []
        for row, (first, count, length) in enumerate(
            zip(firsts.tolist(), counts.tolist(), lengths.tolist(), strict=True)
        ):
            table[row, :count] = torch.arange(first, first + count)
            slots.append(first * _PAGE + torch.arange(length))
        keys, values = pages.chunk(2, dim=2)
        isa = _get_attn_isa(key.dtype, _PAGE, width)
        num_tokens = int(bounds[-1])
        self._ops.cpu_attn_reshape_and_cache(
            key[:num_tokens].contiguous(),
            value[:num_tokens].contiguous(),
            keys,
            values,
            torch.cat(slots),
            isa,
        )
        schedule = self._ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(counts),
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=width,
            seq_lens=lengths,
            dtype=key.dtype,
            query_start_loc=bounds,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        out = torch.zeros_like(query)
        self._ops.cpu_attention_with_kv_cache(
            query=query.contiguous(),
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=bounds,
            seq_lens=lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
        return out, None

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the logits of `hidden`, in the element type `dtype`."""
        return row_kernels.product(hidden.to(dtype), weight.to(dtype))

    def token_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probabilities of the token ids `targets`, [rows, targets]."""
        return logits.log_softmax(-1, dtype=torch.float32).gather(-1, targets)


class _GpuKernels(EngineKernels):
    """The batch-invariant kernels of vLLM's layers on GPUs."""

    def __init__(self) -> None:
        # vLLM's kernels read this at their first call, and then sum rows of a norm in one order.
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        super().__init__()
        from vllm.model_executor.determinism import batch_invariant
        from vllm.v1.attention.backends import fa_utils
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        # The engine has the same settings: the product of the output layer is then not summed in
        # parts. vLLM's batch-invariant mode would replace operations of torch that the backward
        # pass and checks in float64 need.
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
        torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in ("bf16", "fp16"):
            setting = f"allow_{name}_reduced_precision_reduction"
            setattr(torch.backends.cuda.matmul, setting, (False, False))
        batch_invariant.resolve_tuned_matmul_configs()
        self._invariant = batch_invariant
        self._flash = functools.partial(
            fa_utils.flash_attn_varlen_func, fa_version=fa_utils.get_flash_attn_version()
        )
        self._score = compute_token_logprobs

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = self._invariant.linear_batch_invariant(x, weight, bias)
        return result

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        is_sum: bool,
    ) -> Tensor:
        # In vLLM residual sums have a separate kernel.
        if not is_sum:
            result: Tensor = self._invariant.rms_norm_batch_invariant(x, weight, eps)
            return result
        # The sum is already rounded as that kernel rounds it.
        out = x.contiguous().clone()
        self._ops.fused_add_rms_norm(out, torch.zeros_like(out), weight, eps)
        return out

    def gate(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2).contiguous()
        out = flat.new_empty(len(flat), flat.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, flat)
        return out.view(*x.shape[:-1], -1)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float
    ) -> Output:
        longest = int(bounds.diff().max())
        result: Output = self._flash(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=longest,
            cu_seqlens_q=bounds,
            max_seqlen_k=longest,
            cu_seqlens_k=bounds,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            return_softmax_lse=True,
        )
        return result

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == hidden.dtype:
            return self.product(hidden, weight, None)
        return torch.mm(hidden, weight.t(), out_dtype=dtype)

    def token_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = self._score(logits, targets)
        return result


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@functools.cache
def engine_kernels() -> EngineKernels:
    """Returns the kernels for this process's device."""
    return _GpuKernels() if torch.cuda.is_available() else EngineKernels()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return engine_kernels().product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        grad = grads[0]
        rows = grad.flatten(0, -2)
        bias = rows.sum(0) if ctx.has_bias else None
        return grad @ weight, rows.t() @ x.flatten(0, -2), bias


class _Recomputed(torch.autograd.Function):
    """Computes values with `kernel`, and gradients by a recomputation with `reference` in torch."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, reference: Any, *inputs: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(*inputs)
        ctx.reference = reference
        result: Tensor = kernel(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            result = ctx.reference(*inputs)
        return None, None, *torch.autograd.grad(result, inputs, grads)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        scale: float,
    ) -> Tensor:
        out, totals = engine_kernels().attend(query, key, value, bounds, scale)
        ctx.save_for_backward(query, key, value, out, totals, bounds)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, key, value, out, totals, bounds = ctx.saved_tensors
        longest = int(bounds.diff().max())
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            query.contiguous(),
            key.contiguous(),
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
            scale=ctx.scale,
        )
        return *gradients, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x` [..., in] times `weight` [out, in], plus the bias."""
    return _Product.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


class EqualColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """The engine's linear layer in place of Megatron's column-parallel layer."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Output:
        """Returns (product with bias, None), or (product, bias) if the caller must add the bias."""
        matrix = self.weight if weight is None else weight
        bias = None if self.skip_bias_add else self.bias
        result = product(input_, matrix, bias)
        return result, self.bias if self.skip_bias_add else None


class EqualRowLinear(RowParallelLinear):  # type: ignore[misc]
    """The engine's linear layer in place of Megatron's row-parallel layer."""

    def forward(self, input_: Tensor) -> Output:
        """Returns (product with bias, None); Megatron's layer leaves the bias to the caller."""
        return product(input_, self.weight, self.bias), None


class SumNorm(RMSNorm):
    """The norm of the residual stream after the output of attention or an MLP was added.

    The kernel computes its values, torch's norm its gradients.
    """

    is_sum = True

    def forward(self, x: Tensor) -> Tensor:
        eps = float(self.eps or 0.0)

        def reference(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, weight.shape, weight, eps)

        kernel = functools.partial(engine_kernels().norm, eps=eps, is_sum=self.is_sum)
        return _Recomputed.apply(kernel, reference, x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


class PlainInputNorm(SumNorm):
    """The norm of inputs that are not residual sums: embeddings, queries and keys."""

    is_sum = False


class EqualAttention(CoreAttention):
    """Causal attention of packed [tokens, heads, dim] with the engine's kernel."""

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
        """Returns attention by the engine's kernel, [tokens, heads * dim].

        On CPUs `CoreAttention` computes the gradients.
        """
        assert packed_seq_params is not None, "the engine's kernel takes packed sequences"
        attend_in_torch = super().forward

        def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            result = attend_in_torch(query, key, value, None, packed_seq_params=packed_seq_params)
            return result.view(len(query), -1, value.shape[-1])

        bounds = packed_seq_params.cu_seqlens_q.to(torch.int32)
        scale = self.softmax_scale

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return engine_kernels().attend(query, key, value, bounds, scale)[0]

        result: Tensor
        if query.is_cuda:
            result = _FlashAttention.apply(query, key, value, bounds, scale)  # type: ignore[no-untyped-call]
        else:
            result = _Recomputed.apply(kernel, reference, query, key, value)  # type: ignore[no-untyped-call]
        return result.flatten(1)


def equal_parts(layer: Megatron, *, is_first: bool) -> None:
    """Replaces classes in the spec of a layer by classes of this module.

    `is_first` tells whether the layer reads the embeddings, which are no residual sum.
    """
    attention = layer.self_attention.submodules
    mlp = mlp_parts(layer)
    layer.input_layernorm = PlainInputNorm if is_first else SumNorm
    layer.pre_mlp_layernorm = SumNorm
    attention.core_attention = EqualAttention
    attention.linear_qkv = mlp.linear_fc1 = EqualColumnLinear
    attention.linear_proj = mlp.linear_fc2 = EqualRowLinear
    if attention.q_layernorm is RMSNorm:
        attention.q_layernorm = attention.k_layernorm = PlainInputNorm


@functools.cache
def install() -> None:
    """Makes Megatron compute SwiGLU and rotary embeddings with the engine's kernels.

    The kernel for rotary embeddings is used only by models whose `agreement` is "bits". The kernel
    for SwiGLU is used by all models of the process that have Megatron's `bias_activation_fusion`,
    so from then on only models with the layers of this module may have that setting.
    """
    engine_kernels()

    def gated_mlp(x: Tensor, bias: Tensor | None, *_: object) -> Tensor:
        assert bias is None, "the model has no biases in its MLP"
        return _Recomputed.apply(engine_kernels().gate, _gated, x)  # type: ignore[no-any-return,no-untyped-call]

    AutoMapping.register_module_type("EqualColumnLinear", "column")
    AutoMapping.register_module_type("EqualRowLinear", "row")
    for name in ("SumNorm", "PlainInputNorm"):
        AutoMapping.register_module_type(name, "replicated")
    mlp: Megatron = importlib.import_module("megatron.core.transformer.mlp")
    mlp.bias_swiglu_impl = gated_mlp
    module: Megatron = importlib.import_module("megatron.core.transformer.attention")
    original = module.apply_rotary_pos_emb

    @functools.wraps(original)
    def rotated_by_kernel(
        x: Tensor, freqs: Tensor, config: Megatron, **keywords: Megatron
    ) -> Tensor:
        def reference(x: Tensor) -> Tensor:
            result: Tensor = original(x, freqs, config=config, **keywords)
            return result

        if getattr(config, "agreement", "close") != "bits":
            return reference(x)
        bounds = keywords["cu_seqlens"]
        places = torch.arange(len(x), device=x.device)
        starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        # The angles of position 1 are the frequencies.
        angles = torch.einsum("i,j->ij", places.float(), freqs[1].flatten()[: x.shape[-1] // 2])
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)

        def kernel(x: Tensor) -> Tensor:
            return engine_kernels().rotate(places - starts, x, table)

        return _Recomputed.apply(kernel, reference, x)  # type: ignore[no-any-return,no-untyped-call]

    module.apply_rotary_pos_emb = rotated_by_kernel


def layer_parts(block: Megatron, places: range) -> Megatron:
    """Gives each layer of a block, at its place in the whole model, parts with the engine's bits.

    Returns the norm behind the last layer.
    """
    install()
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for place, layer in zip(places, block.layer_specs, strict=True):
        equal_parts(layer.submodules, is_first=place == 0)
    return SumNorm


class BitsPart(ModelPart):
    """Computes logits and log-probabilities of a model with the engine's kernels."""

    def __init__(self, _: Config) -> None:
        pass

    def kernels(self) -> EngineKernels:
        return engine_kernels()
