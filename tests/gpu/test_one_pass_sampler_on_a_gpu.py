"""The kernel that samples beside vLLM's own and beside log-probabilities in float64."""

import pytest
import torch


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype"),
    [
        (512, 151_936, torch.float32),
        (5, 9_001, torch.bfloat16),
        (3, 4_096, torch.float32),
    ],
)
def test_tokens_are_those_of_vllm_and_their_log_probabilities_of_float64(
    rows: int, vocabulary: int, dtype: torch.dtype
) -> None:
    # Triton comes with torch's CUDA build alone.
    from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
    from slipstream.extensions.fast_decoding.server.one_pass_sampler import (
        kept_token_tensors,
        sample,
    )
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    torch.manual_seed(rows)
    # Rows of a larger array, as where a vocabulary was padded.
    logits = (3 * torch.randn(rows, vocabulary + 64, device="cuda")).to(dtype)[
        :, :vocabulary
    ]
    # A first part without any token that is allowed, and a row with a single one.
    logits[0, : vocabulary // 2] = -torch.inf
    logits[1] = -torch.inf
    logits[1, vocabulary // 3] = 1.0
    # A row with as many tokens as a record has room for, all over the vocabulary.
    is_kept = torch.zeros(vocabulary, dtype=torch.bool, device="cuda")
    is_kept[torch.randperm(vocabulary, device="cuda")[:MAX_KEPT_TOKENS]] = True
    logits[2, ~is_kept] = -torch.inf
    requests = torch.randperm(rows, device="cuda", dtype=torch.int32)
    requests[2] = -1
    temperatures = torch.ones(rows, device="cuda")
    temperatures[: rows // 4] = 0.0
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), device="cuda")
    positions = torch.randint(4_096, (rows,), device="cuda")

    tokens, logprobs, part_counts = sample(
        logits, requests, temperatures, seeds, positions
    )

    expected = gumbel_sample(
        logits,
        requests,
        temperatures,
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
    )
    assert torch.equal(tokens, expected)
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert float((logprobs - exact).abs().max()) < 2e-6 * float(
        exact.abs().max().clamp(min=1.0)
    )

    kept_tokens = kept_token_tensors(logits, part_counts).to_cpu_nonblocking()
    torch.cuda.synchronize()
    sets = kept_tokens.tolists().to_nested_list()
    for row in range(min(rows, 8)):
        kept_ids = torch.isfinite(logits[row]).nonzero().flatten().tolist()
        assert sets[row] == (kept_ids if len(kept_ids) <= MAX_KEPT_TOKENS else [])
