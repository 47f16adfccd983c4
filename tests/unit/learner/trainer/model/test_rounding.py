"""Masters become 16-bit weights without a bias, as a function of their bits."""

import pytest
import torch
from slipstream.learner.trainer.model.rounding import stochastic_bfloat16


@pytest.mark.parametrize("part", [1, 0x1000, 0x8000, 0xF000, 0xFFFF])
def test_a_weight_is_rounded_up_as_often_as_it_is_near(part: int) -> None:
    # Numbers of all sizes and signs whose cut-off part is the same.
    random = torch.Generator().manual_seed(part)
    high = torch.randint(0x0080, 0x7F00, (200_000,), generator=random, dtype=torch.int32)
    signs = torch.randint(0, 2, high.shape, generator=random, dtype=torch.int32)
    bits = ((high + (signs << 15)) << 16) + part
    masters = bits.view(torch.float32)
    down = (bits & ~0xFFFF).view(torch.float32)
    up = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    found = stochastic_bfloat16(masters, seed=7).float()
    assert bool(((found == down) | (found == up)).all())
    share = float((found == up).double().mean())
    assert share == pytest.approx(part / 0x10000, abs=0.006)


def test_the_choice_depends_on_the_number_and_the_seed_alone() -> None:
    masters = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 0.02
    whole = stochastic_bfloat16(masters, seed=3)
    assert torch.equal(whole[100:200], stochastic_bfloat16(masters[100:200].clone(), seed=3))
    assert torch.equal(whole, stochastic_bfloat16(masters.view(10, 100), seed=3).view(-1))
    assert not torch.equal(whole, stochastic_bfloat16(masters, seed=4))


def test_numbers_of_bfloat16_stay() -> None:
    every = torch.arange(0x10000, dtype=torch.int32) << 16
    numbers = every.view(torch.float32)
    numbers = numbers[~numbers.isnan()]
    for seed in range(3):
        found = stochastic_bfloat16(numbers, seed=seed).float()
        assert torch.equal(found.view(torch.int32), numbers.view(torch.int32))


def test_small_updates_arrive_on_average() -> None:
    # A thousandth of the distance between two numbers of bfloat16, 500 times.
    masters = torch.full((4000,), 1.0) + torch.rand(4000) * 2**-9
    step = 2.0**-17
    moved = masters + 500 * step
    before, after = (stochastic_bfloat16(m, seed=1).double().mean() for m in (masters, moved))
    assert float(after - before) == pytest.approx(500 * step, rel=0.1)
