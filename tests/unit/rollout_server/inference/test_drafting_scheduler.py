"""What counts as drafted."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from slipstream.rollout_server.inference.drafting_scheduler import (  # noqa: E402
    DraftingScheduler,
)


def test_what_fills_a_draft_up_is_not_counted() -> None:
    scheduler = object.__new__(DraftingScheduler)
    scheduler.num_spec_tokens = 3
    scheduler._draft_stats = None
    scheduler._lengths = {"none": 0, "part": 1, "whole": 3}
    scheduler.make_spec_decoding_stats(None, 3, 3, None, "none")
    assert scheduler._draft_stats is None
    for name, accepted in (("part", 2), ("whole", 2), ("of vLLM's own", 1)):
        scheduler.make_spec_decoding_stats(None, 3, accepted, None, name)
    found = scheduler._draft_stats
    assert found is not None
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens) == (3, 7, 4)
