"""What vLLM does with drafts on CPUs, and what is mended."""

import torch
from slipstream.rollout_server.vllm.cpu import repair
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def expanded(values: list[float], ends: list[int]) -> list[float]:
    current_platform.register_triton_kernel_overrides()
    found = rejection_sampler.expand_batch_to_tokens(
        torch.tensor(values), torch.tensor(ends), ends[-1], replace_from=0, replace_to=1
    )
    return found.tolist()


def test_each_drafted_token_gets_the_temperature_of_its_request() -> None:
    repair()
    # The second request has no draft; the third one is greedy.
    assert expanded([0.5, 0.7, 0.0, 2.0], [2, 2, 3, 6]) == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_top_k_alone_takes_a_step_without_drafts() -> None:
    repair()
    for number in (0, 2):
        logits = torch.arange(number * 3.0).view(number, 3)
        kept = apply_top_k_top_p(logits, torch.full((number,), 2, dtype=torch.int32), None)
        assert kept.isfinite().tolist() == [[False, True, True]] * number
