"""What vLLM does on CPUs, corrected where it computes something else or nothing."""

import functools

import pytest
import torch
from slipstream.rollout_server.vllm import cpu
from slipstream.rollout_server.vllm.loader_update import initialized
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader import reload
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


@pytest.fixture(autouse=True)
def repaired() -> None:
    cpu.repair()


@pytest.mark.parametrize("heads", [1, 4])
def test_each_head_of_latent_attention_is_rotated(heads: int) -> None:
    table = {"rope_type": "default", "rope_theta": 300.0}
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            64,
            max_position=32,
            rope_parameters=table,
            is_neox_style=False,
            dtype=torch.float32,
        )
    # vLLM rotates a part of each head and of the latent vector.
    query = torch.randn(5, heads, 192)
    latent = torch.randn(5, 576)
    rotated_part = query[..., 128:]
    key = latent[:, None, 512:]
    places = torch.arange(5)
    expected = rope.forward_native(places, rotated_part.clone(), key.clone())
    for rotated, expected_heads in zip(
        rope.forward_cpu(places, rotated_part, key), expected, strict=True
    ):
        torch.testing.assert_close(rotated, expected_heads)


def test_heads_in_one_dimension_are_rotated_by_the_kernel() -> None:
    with set_current_vllm_config(VllmConfig()):
        table = {"rope_type": "default", "rope_theta": 300.0}
        rope = get_rope(64, max_position=32, rope_parameters=table, dtype=torch.float32)
    query = torch.randn(5, 256)
    key = torch.randn(5, 128)
    places = torch.arange(5)
    expected = rope.forward_native(places, query.clone(), key.clone())
    for rotated, expected_heads in zip(
        rope.forward_cpu(places, query, key), expected, strict=True
    ):
        torch.testing.assert_close(rotated, expected_heads)


def test_experts_without_groups_are_chosen_by_sigmoid_scores_and_biases() -> None:
    bias = torch.randn(6)
    logits = torch.randn(7, 6)
    router = CPURouter(2, 6, scoring_func="sigmoid", e_score_correction_bias=bias)
    weights, experts = router._compute_routing(torch.randn(7, 4), logits, None)
    scores = logits.sigmoid()
    best = (scores + bias).topk(2).indices
    assert torch.equal(experts.long().sort()[0], best.sort()[0])
    routed = torch.zeros_like(scores).scatter(1, experts.long(), weights)
    plain_routed = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
    torch.testing.assert_close(
        routed, plain_routed / plain_routed.sum(-1, keepdim=True)
    )


def test_a_loader_without_a_name_is_no_obstacle_to_new_weights() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.weight.weight_loader = functools.partial(lambda parameter, loaded: None)
    reload.record_metadata_for_reloading(layer)
    initialized(layer)


def expanded(values: list[float], ends: list[int]) -> list[float]:
    current_platform.register_triton_kernel_overrides()
    expand_batch_to_tokens = rejection_sampler.expand_batch_to_tokens(
        torch.tensor(values), torch.tensor(ends), ends[-1], replace_from=0, replace_to=1
    )
    return expand_batch_to_tokens.tolist()


def test_each_drafted_token_gets_the_temperature_of_its_request() -> None:
    # The second request has no draft; the third one is greedy.
    assert expanded([0.5, 0.7, 0.0, 2.0], [2, 2, 3, 6]) == [
        0.5,
        0.5,
        1.0,
        2.0,
        2.0,
        2.0,
    ]


def test_top_k_alone_takes_a_step_without_drafts() -> None:
    for number in (0, 2):
        logits = torch.arange(number * 3.0).view(number, 3)
        cut_logits = apply_top_k_top_p(
            logits, torch.full((number,), 2, dtype=torch.int32), None
        )
        assert cut_logits.isfinite().tolist() == [[False, True, True]] * number
