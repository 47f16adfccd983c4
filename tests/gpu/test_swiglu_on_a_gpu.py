"""SwiGLU and its gradient beside float64."""

import torch
from slipstream.learner.trainer.ranks import compat


def test_swiglu_and_its_gradient_are_those_of_float64() -> None:
    compat.install()
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    x = torch.randn(
        301, 2 * 96, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    outer = torch.randn(301, 96, device="cuda", dtype=torch.bfloat16)
    y = SwiGLUFunction.apply(x, False, False)
    (gradient,) = torch.autograd.grad(y, x, outer)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    wide_y = torch.nn.functional.silu(gate) * up
    assert (y.double() - wide_y).norm() < 5e-3 * wide_y.norm()
    (expected,) = torch.autograd.grad(wide_y, wide, outer.double())
    assert (gradient.double() - expected).norm() < 1e-2 * expected.norm()
