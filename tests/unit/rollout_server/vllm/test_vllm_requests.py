"""What becomes of the sets of tokens that vLLM says a reply was drawn from."""

from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.core.kept_tokens import MAX_KEPT_TOKENS
from slipstream.rollout_server.engine_interface import GenerationFailed
from slipstream.rollout_server.vllm.vllm_requests import ReplyRecord


def record_of(sets: list[list[int]]) -> tuple[ReplyRecord, Any]:
    """A reply of one token for each set, and its last output."""
    number = len(sets)
    span = SimpleNamespace(start=0, end=number, version="0:3")
    completion = SimpleNamespace(
        token_ids=[kept[0] if kept else 0 for kept in sets],
        logprobs=SimpleNamespace(
            logprobs=[-1.0] * number,
            start_indices=[*range(number)],
        ),
        sampling_mask=SimpleNamespace(token_ids=sets),
        finish_reason="length",
        stop_reason=None,
        weight_versions=[span],
        routed_experts=None,
    )
    output = SimpleNamespace(
        outputs=[completion],
        num_cached_tokens=0,
        prompt_logprobs=None,
    )
    record = ReplyRecord(records_kept_tokens=True)
    record.take(output)
    return record, output


def test_a_set_is_recorded_with_as_many_tokens_as_a_record_has_room_for() -> None:
    full = [*range(MAX_KEPT_TOKENS)]
    record, output = record_of([[5, 9], full])
    kept_tokens = record.generation(output).kept_tokens
    assert kept_tokens is not None
    assert kept_tokens.counts.tolist() == [2, MAX_KEPT_TOKENS]
    assert kept_tokens.ids.tolist() == [5, 9, *full]


@pytest.mark.parametrize(
    "large", [[], [*range(MAX_KEPT_TOKENS + 1)]], ids=["left out", "whole"]
)
def test_a_reply_with_a_larger_set_fails_whichever_sampler_says_so(
    large: list[int],
) -> None:
    record, output = record_of([[5], large, [7]])
    with pytest.raises(
        GenerationFailed, match="token 1 of a reply was drawn from more than 1024"
    ):
        record.generation(output)
