"""Which steps are sampled by one kernel; the kernel itself has its test in tests/gpu."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.extensions.fast_decoding.server import one_pass_sampler
from slipstream.extensions.fast_decoding.server.one_pass_sampler import (
    KeptTokenTensors,
    OnePassSampler,
    OnePassWorker,
    Sampler,
)

ROWS = 3
VOCABULARY = 7


class States:
    """Sampling states in which every row has a temperature of 0."""

    temperature = SimpleNamespace(gpu=torch.zeros(ROWS))
    seeds = SimpleNamespace(gpu=torch.zeros(ROWS, dtype=torch.int64))


# The output that vLLM's own sampler returns.
OF_VLLM = SimpleNamespace(sampling_mask_tensors=None)


def plain_sample(
    logits: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, tokens = logits.log_softmax(-1).max(-1)
    is_kept = torch.isfinite(logits)
    counts = is_kept.sum(dim=1, keepdim=True)
    return tokens, logprobs, counts.to(torch.int32)


def plain_kept_tokens(
    logits: torch.Tensor, part_counts: torch.Tensor
) -> KeptTokenTensors:
    is_kept = torch.isfinite(logits)
    token_ids = torch.argsort(
        ~is_kept,
        dim=1,
        stable=True,
    )
    return KeptTokenTensors(
        token_ids=token_ids.to(torch.int32),
        counts=part_counts.sum(dim=1),
    )


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - vLLM tells no types
    sampler = object.__new__(OnePassSampler)
    vars(sampler).update(
        logprobs_mode="processed_logprobs",
        use_fp64_gumbel=False,
        compute_nans=False,
        return_sampling_mask=False,
        trace_replay_state=None,
        sampling_states=States(),
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=None)),
        get_logprobs_dims=lambda _: (0, 0),
        apply_sampling_params=lambda logits, *_: logits - 1.0,
    )
    monkeypatch.setattr(one_pass_sampler, "sample", plain_sample)
    monkeypatch.setattr(one_pass_sampler, "kept_token_tensors", plain_kept_tokens)
    monkeypatch.setattr(
        one_pass_sampler,
        "get_num_sampled_and_rejected",
        lambda ones, *_: (ones, ones - 1),
    )
    monkeypatch.setattr(Sampler, "__call__", lambda *_: OF_VLLM)
    return sampler


def batch() -> SimpleNamespace:
    row_numbers = torch.arange(ROWS)
    return SimpleNamespace(
        idx_mapping_np=np.arange(ROWS),
        idx_mapping=row_numbers,
        expanded_idx_mapping=row_numbers,
        expanded_local_pos=row_numbers,
        logits_indices=row_numbers,
        positions=row_numbers,
        input_ids=row_numbers,
        seq_lens=torch.ones(ROWS, dtype=torch.int32),
        seq_lens_cpu_upper_bound=row_numbers,
        cu_num_logits=row_numbers,
        num_reqs=ROWS,
    )


def test_tokens_and_log_probabilities_have_vllms_form(sampler: Any) -> None:
    logits = torch.randn(ROWS, VOCABULARY)
    output = sampler(logits, batch())
    tokens, logprobs, _ = plain_sample(logits)
    assert output.sampled_token_ids.tolist() == tokens[:, None].tolist()
    assert torch.equal(output.logprobs_tensors.logprob_token_ids, tokens[:, None])
    torch.testing.assert_close(output.logprobs_tensors.logprobs, logprobs[:, None])
    assert output.logprobs_tensors.selected_token_ranks.tolist() == [0] * ROWS
    assert (output.num_sampled.tolist(), output.num_rejected.tolist()) == (
        [1] * ROWS,
        [0] * ROWS,
    )


def test_kept_tokens_are_returned_where_they_are_recorded(sampler: Any) -> None:
    logits = torch.zeros(ROWS, VOCABULARY)
    logits[0, 1:6] = -torch.inf
    logits[1, :4] = -torch.inf
    assert sampler(logits, batch()).sampling_mask_tensors is None
    sampler.return_sampling_mask = True
    output = sampler(logits, batch())
    on_host = output.sampling_mask_tensors.to_cpu_nonblocking()
    num_sampled = np.ones(ROWS)
    step_sets = on_host.tolists(num_sampled)
    all_ids = list(range(VOCABULARY))
    assert step_sets.to_nested_list() == [[0, 6], [4, 5, 6], all_ids]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("get_logprobs_dims", None),
        ("get_logprobs_dims", (5, 0)),
        ("get_logprobs_dims", (0, 2)),
        ("logprobs_mode", "raw_logprobs"),
        ("use_fp64_gumbel", True),
        ("compute_nans", True),
        ("trace_replay_state", "a trace"),
    ],
)
def test_whatever_else_is_asked_for_is_vllms(
    sampler: Any, name: str, value: object
) -> None:
    setattr(sampler, name, (lambda _: value) if name == "get_logprobs_dims" else value)
    assert sampler(torch.zeros(ROWS, VOCABULARY), batch()) is OF_VLLM


def test_rows_of_drafts_are_vllms(sampler: Any) -> None:
    assert sampler(torch.zeros(2 * ROWS, VOCABULARY), batch()) is OF_VLLM


@pytest.mark.parametrize("kind", [Sampler, dict])
def test_a_worker_replaces_vllms_sampler_alone(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = object.__new__(OnePassWorker)
    worker.model_runner = SimpleNamespace(sampler=kind.__new__(kind))
    monkeypatch.setattr(OnePassWorker.__base__, "load_model", lambda *_, **__: None)
    worker.load_model()
    assert type(worker.model_runner.sampler) is (
        OnePassSampler if kind is Sampler else kind
    )
