"""What Megatron's objects are made of on machines with GPUs."""

from __future__ import annotations

import pytest
from slipstream.learner.trainer import recipe
from slipstream.protocol.config import LearnerSection


@pytest.mark.parametrize(
    ("learner", "reduce", "gather"),
    [
        ({}, False, False),
        ({"use_distributed_optimizer": True}, False, False),
        ({"world_size": 4, "parallel": {"tp": 2, "pp": 2}}, False, False),
        ({"world_size": 2}, True, False),
        ({"world_size": 2, "parallel": {"cp": 2}}, True, False),
        ({"world_size": 4, "parallel": {"tp": 2}, "use_distributed_optimizer": True}, True, True),
        ({"world_size": 2, "offload": {"parameters": True}}, False, False),
        ({"world_size": 2, "offload": {"gradients": True}}, False, False),
        ({"world_size": 2, "offload": {"optimizer": True}}, True, False),
    ],
)
def test_replicas_overlap_what_they_exchange_unless_it_is_offloaded(
    learner: dict, reduce: bool, gather: bool
) -> None:
    found = recipe._overlap(LearnerSection.model_validate(learner))
    assert found == {"overlap_grad_reduce": reduce, "overlap_param_gather": gather}
