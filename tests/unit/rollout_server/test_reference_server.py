"""The server of a reference model: what episodes carry of it, and what its failures do."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ReferenceServerSection
from slipstream.core.types import FailureKind, Status
from slipstream.extensions.reference_server.server import (
    MAX_OPEN,
    ReferenceServer,
    ScoredSequence,
    check_reference_servers,
)
from slipstream.learner.trainer.tiny_model import make_tokenizer
from slipstream.rollout_server.episodes import dispatcher
from slipstream.rollout_server.episodes.play import ServiceFailed
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.v1 import fleet_pb2, trajectory_pb2
from support.fakes.reference_endpoint import (
    VOCAB,
    ReferenceEndpoint,
    reference_endpoint,
)
from support.rigs.waiting import LIMIT_S, until


@pytest.fixture
def endpoint() -> Iterator[ReferenceEndpoint]:
    with reference_endpoint() as served:
        yield served


def section(endpoint: ReferenceEndpoint, **changes: Any) -> ReferenceServerSection:
    table = {"base_url": endpoint.url, "model": "teacher", "timeout_s": 30.0}
    return ReferenceServerSection.model_validate(table | changes)


def with_server(config: Config, settings: ReferenceServerSection) -> Config:
    table = config.model_dump(mode="json", exclude_defaults=True)
    table["algorithm"]["kl"] = {"coefficient": 1.0, "estimator": "forward_top_k"}
    server = settings.model_dump(mode="json", exclude_none=True)
    table["reference"] = {"server": server, "top_k": 3}
    return parse_config(table, source="test")


def scored(tokens: list[int], sampled: list[int]) -> ScoredSequence:
    return ScoredSequence(tokens, np.array(sampled, dtype=np.bool_))


ONE = scored([1, 4], [0, 1])


async def ask(
    settings: ReferenceServerSection,
    *sequences: ScoredSequence,
    top_k: int = 3,
    retries: int = 5,
) -> Any:
    server = ReferenceServer(
        settings,
        "reference.server",
        top_k=top_k,
        vocab_size=VOCAB,
        max_tokens=64,
        max_retries=retries,
    )
    try:
        return await server.logprobs(sequences)
    finally:
        await server.aclose()


async def test_the_sampled_tokens_of_all_sequences_come_back_in_order(endpoint) -> None:
    references = await ask(
        section(endpoint), scored([1, 4, 5, 6], [0, 1, 0, 1]), scored([7, 8], [1, 1])
    )
    # Likely tokens at place p are p, p + 1 and p + 2; nothing predicts the first token.
    assert references.top_ids.tolist() == [[1, 2, 3], [3, 4, 5], [0, 0, 0], [1, 2, 3]]
    assert references.logprobs.tolist() == [-5.0, -5.0, 0.0, -5.0]
    assert references.top_logprobs[0].tolist() == pytest.approx([-0.7, -1.4, -2.1])
    assert [request["prompt"] for request in endpoint.asked] in (
        [[1, 4, 5, 6], [7, 8]],
        [[7, 8], [1, 4, 5, 6]],
    )
    assert all(request["model"] == "teacher" for request in endpoint.asked)


async def test_a_likely_token_that_was_sampled_counts_as_both(endpoint) -> None:
    references = await ask(section(endpoint), scored([9, 2], [0, 1]))
    assert references.top_ids.tolist() == [
        [2, 1, 3]
    ] or references.top_ids.tolist() == [[1, 2, 3]]
    assert references.logprobs.tolist() == pytest.approx([-1.4])


async def test_without_likely_tokens_only_the_sampled_ones_are_asked_for(
    endpoint,
) -> None:
    references = await ask(section(endpoint), ONE, top_k=0)
    assert references.logprobs.tolist() == [-5.0]
    assert references.top_ids.shape == references.top_logprobs.shape == (1, 0)
    assert endpoint.asked[0]["prompt_logprobs"] == 0


async def test_no_proxy_of_the_machine_is_asked_for_a_server_on_loopback(
    endpoint, monkeypatch
):
    """It would not find the server, and read the texts and the key."""
    with reference_endpoint() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        await ask(section(endpoint), ONE)
    assert (len(endpoint.keys), proxy.keys) == (1, [])


async def test_a_call_is_repeated_and_then_given_up(endpoint) -> None:
    busy = (503, {"error": {"message": "no engine"}})
    endpoint.answers = [busy, busy]
    await ask(section(endpoint), ONE, retries=2)
    assert len(endpoint.asked) == 3
    endpoint.answers = [busy, busy]
    with pytest.raises(
        ServiceFailed, match="the reference model teacher at http.*no engine"
    ):
        await ask(section(endpoint), ONE, retries=1)


async def test_an_answer_that_is_too_long_is_not_read_to_its_end(endpoint) -> None:
    endpoint.answers = [(200, {"choices": [], "more": "x" * (2 << 20)})]
    with pytest.raises(ServiceFailed, match="its answer has more than 1114112 bytes"):
        await ask(section(endpoint), ONE, retries=0)


async def test_no_more_calls_are_open_than_allowed(endpoint) -> None:
    endpoint.hold.clear()
    asking = asyncio.create_task(
        ask(
            section(endpoint),
            *[scored([1, number], [0, 1]) for number in range(MAX_OPEN + 4)],
        )
    )
    async with asyncio.timeout(LIMIT_S):
        await until(lambda: endpoint.open >= MAX_OPEN)
        endpoint.hold.set()
        await asking
    assert (len(endpoint.asked), endpoint.most_open) == (MAX_OPEN + 4, MAX_OPEN)


def without_token(rows: list[Any]) -> list[Any]:
    return [
        row and {name: entry for name, entry in row.items() if entry["logprob"] != -5}
        for row in rows
    ]


def logits(rows: list[Any]) -> list[Any]:
    return [
        row and {name: {**entry, "logprob": 3.5} for name, entry in row.items()}
        for row in rows
    ]


def other_vocabulary(rows: list[Any]) -> list[Any]:
    return [row and row | {"999": {"logprob": -0.7, "rank": 1}} for row in rows]


def beyond(rows: list[Any]) -> list[Any]:
    return [
        row
        and {str(int(name) + 31): entry for name, entry in row.items()}
        | {"4": row["4"]}
        for row in rows
    ]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda rows: rows[:-1], "must give prompt_logprobs of 2 tokens, got 1"),
        (lambda rows: None, "must give prompt_logprobs of 2 tokens, got none"),
        (without_token, "must give the token and 3 likely ones at each position"),
        (
            lambda rows: [None, {}],
            "must give the token and 3 likely ones at each position",
        ),
        (lambda rows: ["x"], "gave no completion"),
        (logits, "must run with --logprobs-mode raw_logprobs: .* is 3.5, above 0"),
        (other_vocabulary, "must give the token and 3 likely ones"),
        (beyond, "names token 34, outside the vocabulary of 32"),
    ],
)
async def test_an_answer_that_cannot_serve_is_no_answer(
    endpoint, change, cause: str
) -> None:
    endpoint.change = change
    with pytest.raises(ServiceFailed, match=cause):
        await ask(section(endpoint), ONE)


async def test_a_key_is_read_from_its_file(endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    await ask(section(endpoint, api_key_file=str(key)), ONE)
    assert endpoint.keys == ["Bearer secret"]
    for text, cause in (("", "is empty"), (None, "cannot be read")):
        key.write_text(text) if text is not None else key.unlink()
        with pytest.raises(
            ConfigError, match=f"reference.server.api_key_file .* {cause}"
        ):
            await ask(section(endpoint, api_key_file=str(key)), ONE)


async def test_episodes_carry_what_the_reference_says(
    config, endpoint, start_server
) -> None:
    async with start_server(with_server(config, section(endpoint))) as server:
        server.fleet.client.turns = 2
        connection = await server.leased(members=[0])
        (trained,) = await server.fleet.wait_trajectories(1)
        purpose = trajectory_pb2.EPISODE_PURPOSE_EVALUATION
        connection.lease("g2", members=[0], purpose=purpose)
        _, judged = await server.fleet.wait_trajectories(2)
    assert trained.token_ids.tolist() == [1, 4, 5, 3, 9, 9, 9, 2, 6, 3, 9, 9, 9, 2]
    places = [4, 5, 6, 7, 10, 11, 12, 13]
    assert sorted(trained.reference.top_ids[0].tolist()) == [4, 5, 6]
    assert [sorted(row) for row in trained.reference.top_ids.tolist()] == [
        [place, place + 1, place + 2] for place in places
    ]
    assert len(trained.reference.logprobs) == trained.num_sampled_tokens
    assert judged.status is Status.COMPLETED
    assert judged.reference is None
    assert [request["prompt"] for request in endpoint.asked] == [
        trained.token_ids.tolist()
    ]


async def test_each_environment_asks_its_own_teachers_server(
    config, endpoint, start_server
) -> None:
    with reference_endpoint() as other:
        table = with_server(config, section(endpoint)).model_dump(
            mode="json", exclude_none=True
        )
        server = section(other).model_dump(mode="json", exclude_none=True)
        table["reference"]["teachers"] = {
            "behind": {"environments": ["fake"], "server": server},
            "itself": {"environments": ["another"], "policy": True},
        }
        settings = parse_config(table, source="test")
        async with start_server(settings) as started:
            connection = await started.leased(members=[0])
            (taught,) = await started.fleet.wait_trajectories(1)
            connection.lease("g2", "third", members=[0])
            await started.fleet.wait_trajectories(2)
            connection.lease("g3", "another", members=[0])
            *_, third, unscored = await started.fleet.wait_trajectories(3)
        assert taught.reference is not None
        assert [request["prompt"] for request in other.asked] == [
            taught.token_ids.tolist()
        ]
        assert third.reference is not None
        assert len(endpoint.asked) == 1
        assert unscored.status is Status.COMPLETED
        assert unscored.reference is None


async def test_every_teachers_server_is_checked_by_its_name(
    checked: Config, endpoint: ReferenceEndpoint
) -> None:
    with reference_endpoint() as other:
        other.texts = endpoint.texts
        table = checked.model_dump(mode="json", exclude_none=True)
        server = section(other).model_dump(mode="json", exclude_none=True)
        table["reference"]["teachers"] = {
            "code": {"environments": ["e"], "server": server}
        }
        changed = parse_config(table, source="test")
        await check_reference_servers(changed)
        assert (len(endpoint.asked), len(other.asked)) == (1, 1)
        other.max_model_len = 32
        said = "^reference.teachers.code.server: the .* got max_model_len 32"
        with pytest.raises(ConfigError, match=said):
            await check_reference_servers(changed)


async def test_an_episode_whose_reference_fails_has_failed(
    config, endpoint, start_server, monkeypatch
) -> None:
    monkeypatch.setattr(dispatcher, "RETRY_S", 0.01)
    endpoint.answers = [(400, {"error": {"message": "too long"}})]
    settings = with_server(config, section(endpoint))
    async with start_server(settings) as server:
        failed, good = await server.played(2, max_attempts=2)
    assert (failed.status, failed.failure.kind) == (
        Status.FAILED,
        FailureKind.INFRASTRUCTURE,
    )
    assert "the reference model teacher at http" in failed.failure.message
    assert "too long" in failed.failure.message
    assert (failed.reward, failed.reference, failed.will_retry) == (0.0, None, True)
    # The tokens were sampled all the same: the ledger counts them.
    assert failed.num_sampled_tokens == 4
    assert (good.status, good.attempt) == (Status.COMPLETED, 1)
    assert good.reference is not None


async def test_a_cancelled_episode_does_not_wait_for_the_reference(
    config, endpoint, start_server
):
    endpoint.hold.clear()
    async with start_server(with_server(config, section(endpoint))) as server:
        connection = await server.leased(members=[0])
        await until(lambda: endpoint.open, 60)
        connection.send(cancel=fleet_pb2.CancelLease(group_id="g1", reason="test"))
        (cancelled,) = await server.fleet.wait_trajectories(1)
        endpoint.hold.set()
    assert cancelled.status is Status.CANCELLED
    assert cancelled.reference is None


@pytest.fixture
def checked(config: Config, endpoint: ReferenceEndpoint, renderer: Renderer) -> Config:
    """Settings with a server that has the tokenizer of the model."""
    endpoint.texts = renderer.decode_all
    return with_server(config, section(endpoint))


async def test_a_server_with_the_models_tokenizer_passes(
    endpoint, checked: Config
) -> None:
    await check_reference_servers(checked)


async def test_other_tokenizers_are_refused_in_one_line(endpoint, checked, tmp_path):
    make_tokenizer(tmp_path / "other")
    other = Renderer(tmp_path / "other")
    endpoint.texts = lambda ids: other.decode_all(ids).replace("d", "e")
    with pytest.raises(ConfigError) as caught:
        await check_reference_servers(checked)
    message = str(caught.value)
    assert "\n" not in message
    assert "must have the tokenizer of model.path; tokens 0 to 31 are" in message
    assert len(endpoint.asked) == 0


@pytest.mark.parametrize(
    ("served", "asked", "said"),
    [
        (
            {"max_model_len": 32},
            {},
            "^reference.server: the .* = 33 tokens, got max_model_len 32",
        ),
        (
            {},
            {"model": "student"},
            "^reference.server.model must be one .*, got student",
        ),
        (
            {
                "answers": [
                    (400, {"error": {"message": "greater than max allowed: 20"}})
                ]
            },
            {},
            "^reference.server: .*greater than max allowed: 20",
        ),
        *(
            (
                {"reply": lambda path, body, form=form: (200, form)},
                {},
                "failed: (Attrib|Type)",
            )
            for form in ([], {"data": 5}, {"data": [5]})
        ),
        (
            {},
            {"base_url": "http://127.0.0.1:9/v1"},
            "^reference.server: .* failed: APIConnectionE",
        ),
    ],
)
async def test_a_server_that_cannot_serve_is_refused(
    endpoint, checked, served, asked, said
):
    for name, value in served.items():
        setattr(endpoint, name, value)
    changed = with_server(checked, checked.reference.server.model_copy(update=asked))
    with pytest.raises(ConfigError, match=said):
        await check_reference_servers(changed)
