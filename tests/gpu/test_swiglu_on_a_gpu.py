"""SwiGLU's gradient beside float64."""

import torch
from slipstream.learner.trainer.ranks import compat


def test_the_gradient_of_swiglu_is_that_of_float64() -> None:
    compat.install()
    from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

    x = torch.randn(301, 2 * 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    outer = torch.randn(301, 96, device="cuda", dtype=torch.bfloat16)
    (found,) = torch.autograd.grad(SwiGLUFunction.apply(x, False, False), x, outer)
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, wide, outer.double())
    assert (found.double() - expected).norm() < 1e-2 * expected.norm()
