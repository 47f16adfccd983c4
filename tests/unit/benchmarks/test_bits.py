"""Tests of the benchmark that compares learner and engine bit by bit."""

import pytest
import torch

from benchmarks.agreement import bits_forward
from benchmarks.agreement.bits_engine import KINDS, Capture, compare

SIZES = bits_forward.Sizes(
    layers=1, heads=2, groups=1, head_dim=32, eps=1e-6, theta=1e6, max_positions=64
)
LAYER = {
    "input_layernorm": (64,),
    "self_attn.qkv_proj": (128, 64),
    "self_attn.q_norm": (32,),
    "self_attn.k_norm": (32,),
    "self_attn.o_proj": (64, 64),
    "post_attention_layernorm": (64,),
    "mlp.gate_up_proj": (192, 64),
    "mlp.down_proj": (64, 96),
}


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {f"model.layers.0.{name}.weight": size for name, size in LAYER.items()}
    sizes |= {"model.embed_tokens.weight": (50, 64), "model.norm.weight": (64,)}
    return {
        name: 0.3 * torch.randn(size, generator=generator) + (len(size) == 1)
        for name, size in sizes.items()
    }


def captured(packed: bits_forward.Packed, kernels: bits_forward.TorchKernels) -> Capture:
    found = Capture(list(zip(packed.positions.tolist(), packed.tokens.tolist(), strict=True)))
    bits_forward.forward(
        random_weights(),
        SIZES,
        kernels,
        packed,
        lambda *one: found.note(one[0], one[1], one[2].flatten(1)),
    )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_fixed_blocks_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(100, 768).to(dtype), torch.randn(256, 768).to(dtype)
    whole = bits_forward.fixed_rows(rows, weight)
    for count in (1, 7, 33):
        assert torch.equal(bits_forward.fixed_rows(rows[:count], weight), whole[:count])
    torch.testing.assert_close(whole, rows @ weight.t(), rtol=0.02, atol=0.5)


def test_own_backward_passes_have_the_gradients_of_torch() -> None:
    tokens = [[3, 4, 5, 6, 7], [8, 9, 10]]
    packed = bits_forward.Packed.of(tokens, torch.device("cpu"))

    class Own(bits_forward.CpuKernels):
        # vLLM's operations are in its build for CPUs alone.
        rotate = bits_forward.TorchKernels.rotate
        attend = bits_forward.TorchKernels.attend

    found = []
    for kind in (bits_forward.TorchKernels, Own):
        kernels = kind(SIZES, torch.float32, torch.device("cpu"), torch.float32)
        leaves = {name: x.requires_grad_() for name, x in random_weights().items()}
        hidden = bits_forward.forward(leaves, SIZES, kernels, packed, lambda *_: None)
        head = leaves["model.embed_tokens.weight"]
        values = kernels.logprobs(hidden, head, packed.tokens.roll(-1))
        plain = (hidden @ head.t()).log_softmax(-1)
        expected = plain.gather(-1, packed.tokens.roll(-1)[:, None]).squeeze(-1)
        torch.testing.assert_close(values, expected)
        grads = torch.autograd.grad(values.sum(), list(leaves.values()), retain_graph=True)
        exact = torch.autograd.grad(expected.sum(), list(leaves.values()))
        torch.testing.assert_close(grads, exact, rtol=1e-3, atol=1e-4)
        found.append(values)
    torch.testing.assert_close(*found)


def test_only_the_kernel_that_differs_is_named() -> None:
    tokens = [[3, 4, 5, 6, 7], [8, 9, 10]]
    packed = bits_forward.Packed.of(tokens, torch.device("cpu"))
    usual = (SIZES, torch.float32, torch.device("cpu"), torch.float32)
    base = captured(packed, bits_forward.TorchKernels(*usual))
    again = compare(captured(packed, bits_forward.TorchKernels(*usual)), base, tokens, 1)
    assert again["first"] == "none"
    assert {kind: again["kernels"][kind] for kind in KINDS} == dict.fromkeys(KINDS, [8, 0])

    class Other(bits_forward.TorchKernels):
        def attend(self, *inputs: torch.Tensor, **_: object) -> torch.Tensor:
            found = super().attend(*inputs)  # type: ignore[arg-type]
            found[4] += 1e-3
            return found

    other = compare(captured(packed, Other(*usual)), base, tokens, 1)
    assert other["first"] == "attn of layer 0"
    assert other["kernels"]["attn"] == [8, 1]
    # What is behind it had other inputs in that row, and is not blamed.
    assert other["kernels"]["o_proj"] == other["kernels"]["norm"] == [7, 0]
