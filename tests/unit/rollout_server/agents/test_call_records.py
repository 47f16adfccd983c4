"""The record of an episode's calls: which call is which, and the experts of a moved branch."""

import numpy as np
import pytest
from slipstream.core.models.images import PlacedImage
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.rollout_server.agents.call_records import (
    NOT_COMPARED,
    CallRecord,
    EpisodeRecord,
    placed_generation,
    prompt_digest,
    request_digest,
)
from slipstream.rollout_server.agents.conversations import ConversationBranch
from slipstream.rollout_server.engine_interface import FinishReason, Generation

REQUEST = {
    "messages": [{"role": "user", "content": "Hi."}],
    "seed": 3,
    "stream": True,
}


def generation(size: int, experts: np.ndarray | None = None) -> Generation:
    return Generation(
        np.arange(size, dtype=np.uint32),
        np.zeros(size, dtype=np.float32),
        (VersionSpan(size, PolicyVersion(0, 1)),),
        FinishReason.STOP,
        expert_ids=experts,
    )


def record(
    request: bytes, *, size: int = 2, experts_from: int = 0, experts=None
) -> CallRecord:
    return CallRecord(
        request_digest=request,
        prompt_digest=b"",
        generation=generation(size, experts),
        experts_from=experts_from,
        is_cut=False,
        reply={},
        status=200,
        headers=(),
        body=b"",
    )


async def kept_nowhere(call: int, record: CallRecord) -> None:
    del call, record


def test_equal_requests_get_their_answers_in_the_order_in_which_they_were_kept() -> (
    None
):
    records = [
        record(b"a", size=1),
        record(b"b", size=2),
        record(b"a", size=3),
    ]
    episode = EpisodeRecord(kept_nowhere, records)
    assert episode.take(b"b") is records[1]
    assert episode.take(b"a") is records[0]
    assert episode.take(b"c") is None
    assert episode.num_unasked == 1
    assert episode.take(b"a") is records[2]
    assert episode.take(b"a") is None
    assert episode.num_unasked == 0


def test_what_was_answered_and_what_could_not_be_is_counted() -> None:
    episode = EpisodeRecord(
        kept_nowhere,
        [record(b"a", size=5), record(b"b")],
    )
    first = episode.take(b"a")
    assert first is not None
    episode.recovered(first)
    assert episode.take(b"b") is not None
    episode.drop()
    assert (episode.num_recovered, episode.num_recovered_tokens) == (1, 5)
    assert episode.num_unasked == 1


@pytest.mark.parametrize("name", sorted(NOT_COMPARED))
def test_names_that_decide_nothing_are_not_compared(name: str) -> None:
    plain = request_digest("/v1/chat/completions", "", REQUEST)
    assert (
        request_digest(
            "/v1/chat/completions",
            "",
            REQUEST | {name: "x"},
        )
        == plain
    )


@pytest.mark.parametrize(
    ("path", "branch", "request_"),
    [
        ("/v1/messages", "", REQUEST),
        ("/v1/chat/completions", "reviewer", REQUEST),
        ("/v1/chat/completions", "", REQUEST | {"seed": 4}),
        ("/v1/chat/completions", "", REQUEST | {"stream": False}),
        ("/v1/chat/completions", "", REQUEST | {"messages": []}),
        ("/v1/chat/completions", "", REQUEST | {"tools": []}),
    ],
)
def test_all_else_makes_another_request(path: str, branch: str, request_: dict) -> None:
    plain = request_digest("/v1/chat/completions", "", REQUEST, 1.0)
    assert request_digest(path, branch, request_, 1.0) != plain
    assert request_digest("/v1/chat/completions", "", REQUEST, 0.5) != plain
    # The order of the fields is no part of it.
    turned = dict(reversed(REQUEST.items()))
    assert request_digest("/v1/chat/completions", "", turned, 1.0) == plain


def test_a_prompt_is_its_tokens_and_its_images_at_their_places() -> None:
    image = PlacedImage(1, b"image")
    digests = {
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2]),
        prompt_digest([1, 2, 3], [image]),
        prompt_digest(
            [1, 2, 3],
            [PlacedImage(2, b"image")],
        ),
        prompt_digest(
            [1, 2, 3],
            [PlacedImage(1, b"other")],
        ),
    }
    assert len(digests) == 5
    assert (
        prompt_digest(
            [1, 2, 3],
            [image],
        )
        in digests
    )


def experts_of(first: int, size: int) -> np.ndarray:
    """The experts of `size` tokens, numbered from `first` on: one layer, one expert."""
    return np.arange(first, first + size, dtype=np.uint8).reshape(
        -1,
        1,
        1,
    )


def branch_with(num_routed: int) -> ConversationBranch:
    branch = ConversationBranch("")
    half = num_routed // 2
    branch.expert_ids += [
        experts_of(0, half),
        experts_of(half, num_routed - half),
    ]
    return branch


@pytest.mark.parametrize(
    ("experts_from", "num_routed"),
    [(7, 7), (0, 7), (7, 0), (4, 7), (7, 3)],
)
def test_a_reply_has_the_experts_that_its_branch_lacks(
    experts_from: int, num_routed: int
) -> None:
    recorded = record(
        b"",
        experts_from=experts_from,
        experts=experts_of(
            experts_from,
            12 - experts_from,
        ),
    )
    placed = placed_generation(
        recorded,
        branch_with(num_routed),
        branch_with(9),
    )
    assert placed.expert_ids is not None
    assert placed.expert_ids.ravel().tolist() == [
        *range(
            num_routed,
            12,
        )
    ]


def test_a_reply_without_experts_is_as_it_was() -> None:
    recorded = record(b"")
    assert (
        placed_generation(
            recorded,
            branch_with(4),
            None,
        )
        is recorded.generation
    )
