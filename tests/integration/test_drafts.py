"""The real vLLM engine with drafts, beside one without and beside transformers."""

import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from slipstream.extensions.fast_decoding.server.steady_decoding import STEADY
from slipstream.rollout_server.engine_interface import FinishReason, Generation
from support.fakes.small_configs import NGRAM
from support.rigs.engine_rig import (
    ENDLESS,
    GREEDY,
    PROMPT,
    PROMPTS,
    TEMPERATURE,
    Rig,
    engine_rig,
)

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


# Fewer blocks than 16 long replies need: some are preempted and computed again.
FEW = {"num_gpu_blocks_override": 20, "speculative_config": NGRAM}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("model")
    async with engine_rig(folder, engine=FEW) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Generation]:
    """The greedy replies of an engine without drafts."""
    async with engine_rig(tmp_path_factory.mktemp("plain")) as rig:
        await rig.publish(rig.old, 0)
        return await rig.replies("g", PROMPTS, 80, GREEDY)


async def test_greedy_replies_and_their_logprobs_are_those_of_an_engine_without(
    rig, plain
) -> None:
    await rig.publish(rig.old, 0)
    before = rig.engine.requests.use()
    replies = await rig.replies("g", PROMPTS, 80, GREEDY)
    for reply, expected in zip(replies, plain, strict=True):
        assert reply.token_ids.tolist() == expected.token_ids.tolist()
        assert np.abs(reply.logprobs - expected.logprobs).max() <= 1e-5
    drafted, accepted = rig.drafted_since(before)
    assert 0 < accepted <= drafted


async def test_the_engine_tells_that_vllm_plans_all_of_its_steps(rig) -> None:
    assert rig.engine.disabled_features[STEADY] == "the engine has drafts"


async def test_sampled_logprobs_are_those_of_the_model(rig) -> None:
    await rig.publish(rig.old, 0)
    before = rig.engine.requests.use()
    for turn in range(2):
        for reply in await rig.replies(f"s{turn}", [PROMPT] * 16, 100, ENDLESS):
            assert rig.gap(rig.old, PROMPT, reply, TEMPERATURE).max() <= 1e-3
            assert len(reply.token_ids) == 100
    assert rig.engine.requests.use().accepted_tokens > before.accepted_tokens + 100


async def test_replies_are_distributed_as_the_model_says(rig) -> None:
    await rig.publish(rig.old, 0)
    await rig.check_drafted_distribution()


async def test_a_reply_ends_inside_an_accepted_draft(rig) -> None:
    await rig.publish(rig.old, 0)
    tokens = (
        await rig.generate("whole", sampling=GREEDY, num_tokens=60)
    ).token_ids.tolist()
    for limit in (1, 2, 16, 17, 40):
        reply = await rig.generate(f"limit-{limit}", sampling=GREEDY, num_tokens=limit)
        assert reply.token_ids.tolist() == tokens[:limit]
        assert reply.finish_reason is FinishReason.LENGTH
    # Tokens that come last stand behind most accepted drafts.
    for stop in [*dict.fromkeys(tokens)][-4:]:
        stopping = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
        reply = await rig.generate(f"stop-{stop}", sampling=stopping, num_tokens=60)
        assert reply.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
        assert reply.finish_reason is FinishReason.STOP
        assert len(reply.logprobs) == len(reply.token_ids)


async def test_an_update_in_flight_is_stamped_where_the_weights_changed(rig) -> None:
    before = rig.engine.requests.use()
    await rig.check_crossings(ENDLESS, 400)
    use = rig.engine.requests.use()
    assert use.accepted_tokens > before.accepted_tokens
    assert use.generated_tokens == use.returned_tokens


async def test_nothing_is_drafted_behind_a_prompt_of_which_one_token_is_left(
    rig,
) -> None:
    await rig.publish(rig.old, 0)
    prompt = [1, *(4 + n % 28 for n in range(128))]
    first = await rig.generate("cold", prompt, 1, GREEDY)
    before = rig.engine.requests.use().drafted_tokens
    again = await rig.generate("warm", prompt, 1, GREEDY)
    assert (first.cached_tokens, again.cached_tokens) == (0, 128)
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert rig.engine.requests.use().drafted_tokens == before
