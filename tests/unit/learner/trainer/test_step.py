from __future__ import annotations

import pytest
from slipstream.learner.trainer.step import learning_rate
from slipstream.protocol.config import AlgorithmSection


def algorithm(warmup_steps: int) -> AlgorithmSection:
    return AlgorithmSection(
        group_size=2, groups_per_step=1, learning_rate=0.4, warmup_steps=warmup_steps
    )


def test_learning_rate_is_constant_without_warmup() -> None:
    assert [learning_rate(algorithm(0), step) for step in (0, 1, 99)] == [0.4, 0.4, 0.4]


def test_learning_rate_rises_evenly_over_the_warmup_and_stays() -> None:
    found = [learning_rate(algorithm(4), step) for step in range(6)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
