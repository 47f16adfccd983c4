"""A step does what docs/algorithms.md says, whatever is combined with what, in every layout.

FUZZ=100 python -m pytest tests/integration/test_fuzzed_steps.py     # another thousand steps
"""

import random

import pytest
from support.ranks import random_steps
from support.ranks.random_steps import RandomStep
from support.references.plain_policy import PlainStep
from support.rigs.fuzz_budget import times

NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

# Together they have every loss, advantage, aggregation and layout of `RandomStep`.
ORDINARY = (1, 3, 7, 18, 21, 22, 32, 45, 63, 68)
# A step of several updates with larger gradients than this makes rounding as large as weights: one
# seed in a thousand, by an estimate of the divergence that grows with the exponential.
DIVERGED = 1e6
SEEDS = ORDINARY if times(1) == 1 else random.sample(range(10**6), times(len(ORDINARY)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fuzzed_step_moves_the_weights_as_documented(seed, folder, rank_pool):
    step = RandomStep(seed, folder)
    config = step.config
    ranks = config.learner.world_size
    found = rank_pool.found(random_steps, {str(seed): ranks}, folder, "step-{}.pt")[str(seed)]
    plain = PlainStep(config.model.path, config)
    if config.reference is not None and config.reference.server is None:
        plain.reference = PlainStep(config.reference.path, config)
    before = plain.weights()
    expected = plain.step(step.batch)
    if expected["grad_norm"] > DIVERGED:
        pytest.skip(f"the step diverges (gradients of {expected['grad_norm']:.0e})")
    for name in ("loss", "grad_norm"):
        assert found["metrics"][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    moves = {name: tensor - before[name] for name, tensor in plain.weights().items()}
    largest = max(float(move.abs().max()) for move in moves.values())
    worst = max(float((found["moves"][n] - moves[n]).abs().max()) for n in found["moves"])
    assert worst <= 1e-3 * largest
