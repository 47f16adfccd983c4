"""Cures of Megatron's faults that ranks on a CPU do not need."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from slipstream.learner.trainer.ranks import compat

clipping = pytest.importorskip("megatron.core.optimizer.clip_grads")


def test_gradient_norms_take_the_kernels_that_transformer_engine_has(
    monkeypatch,
) -> None:
    kernels = ("multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
    engine = SimpleNamespace(**{name: object() for name in kernels})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", engine)
    bound = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
    for name in bound:
        monkeypatch.setattr(clipping, name, None)
    compat._cure_clipping()
    for name, kernel in zip(bound, kernels, strict=True):
        assert getattr(clipping, name) is getattr(engine, kernel)


def test_a_routers_bias_in_16_bits_stays_out_of_a_product_with_32(monkeypatch) -> None:
    """TransformerEngine's product takes a bias for one of the type of what it computes."""
    compat.install()
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    router = importlib.import_module("megatron.core.transformer.moe.router")

    def product(first, second, dtype, layout, bias=None, grad=False):
        assert bias is None or bias.dtype == dtype
        first = first.to(dtype)
        second = second.to(dtype)
        first = first.mT if layout[0] == "T" else first
        second = second.mT if layout[1] == "T" else second
        return second @ first, grad

    monkeypatch.setattr(utils, "te_general_gemm", product)
    shapes = ((5, 1, 8), (4, 8), (4,))
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    logits = router.router_gating_linear(*inputs, torch.float32)
    tokens, weight, bias = (
        tensor.detach().float().requires_grad_() for tensor in inputs
    )
    expected = torch.nn.functional.linear(tokens, weight, bias)
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for ours, plain in zip(inputs, (tokens, weight, bias), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad.bfloat16())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_swiglus_gradient_comes_from_the_kernel_that_transformer_engine_has(
    stored, monkeypatch
) -> None:
    """Also of an input that Megatron stores in 8 bits."""
    fused = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    monkeypatch.setattr(fused.SwiGLUFunction, "backward", fused.SwiGLUFunction.backward)

    def kernel(grad, x, quantizer):
        assert grad.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert quantizer is None
        return grad.sum() * x

    engine = SimpleNamespace(dswiglu=kernel)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", engine)
    compat._use_swiglu_kernel()
    x = torch.randn(5, 12).to(stored)
    outer = torch.ones(6, 5).T
    saved = SimpleNamespace(saved_tensors=(x,), ori_input_dtype=torch.bfloat16)
    gradient, *rest = fused.SwiGLUFunction.backward(saved, outer)
    assert torch.equal(gradient, 30 * x.bfloat16())
    assert rest == [None, None]


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_weights_decay_beside_the_moments_or_within_them(is_decoupled: bool) -> None:
    numbers = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}
    torchs = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    found = []
    for kind, options in (
        (compat.GroupStepAdam, {"adam_w_mode": is_decoupled}),
        (torchs, {}),
    ):
        weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        optimizer = kind([weight], **numbers, **options)
        for step in range(3):
            weight.grad = torch.tensor([0.5, 1.0, -1.0]) * (step + 1)
            optimizer.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
