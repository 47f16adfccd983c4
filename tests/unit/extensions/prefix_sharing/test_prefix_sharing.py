"""Keys by paths and their gradients; what cannot share prefixes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slipstream.core.settings.sections import LearnerSection
from slipstream.extensions.prefix_sharing.trainer import KeysByPath, refusal
from slipstream.learner.trainer.batches.training_sequence import Paths


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gradient_of_a_key_is_the_sum_over_its_copies(dtype: torch.dtype) -> None:
    paths = Paths.of(
        [np.arange(3), np.array([0, 1, 2, 3]), np.array([0, 1, 2, 4, 5])], 6
    )
    key = torch.randn(6, 2, 4, dtype=dtype, requires_grad=True)
    copies = KeysByPath.apply(key, paths)
    assert torch.equal(copies, key[paths.key_places])
    weight = torch.randn(12, 2, 4, dtype=dtype)
    (grad,) = torch.autograd.grad((copies * weight).sum(), key)
    expected = torch.stack(
        [weight[paths.key_places == n].float().sum(0) for n in range(6)]
    )
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, expected.to(dtype))


@pytest.mark.parametrize(
    ("learner", "model", "replay", "cause"),
    [
        ({}, {}, False, ""),
        ({}, {"is_delta_net": [True, False]}, False, "delta nets read"),
        ({"world_size": 2, "parallel": {"cp": 2}}, {}, False, "context parallel"),
        ({}, {"multi_latent_attention": True}, False, "latent"),
        ({}, {"window_size": (128, 0)}, False, "windows"),
        ({}, {}, True, "experts"),
        ({}, {"moe_aux_loss_coeff": 1e-3}, False, "routers count"),
        ({}, {"moe_aux_loss_coeff": [0.0, 1e-3]}, False, "routers count"),
        ({}, {"moe_aux_loss_coeff": [0.0]}, False, ""),
        ({}, {"moe_z_loss_coeff": 1e-3}, False, "routers count"),
        ({}, {"moe_router_enable_expert_bias": True}, False, "routers count"),
        ({}, {"params_dtype": torch.float32}, False, "no fused attention"),
        ({}, {"params_dtype": torch.float16}, False, ""),
    ],
)
def test_what_cannot_share_says_why(learner, model, replay, cause):
    plain = {"multi_latent_attention": False, "window_size": None}
    plain |= {
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "params_dtype": torch.bfloat16,
    }
    plain |= {
        "moe_router_enable_expert_bias": False,
        "moe_router_bias_update_rate": 1e-3,
    }
    model_facts = SimpleNamespace(**(plain | model))
    section = LearnerSection.model_validate(learner)
    found = refusal(model_facts, section, router_replay=replay, on_gpu=True)
    assert cause in found
    assert bool(found) == bool(cause)
