"""A rollout engine of two stages, each with half of the layers, against transformers."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from slipstream.extensions.fast_decoding.server.arguments import (
    ATTENTION,
    CHUNKS,
    SAMPLER,
)
from slipstream.extensions.fast_decoding.server.chunking_scheduler import (
    ChunkingScheduler,
)
from slipstream.extensions.fast_decoding.server.steady_decoding import STEADY
from slipstream.rollout_server.engine_interface import EngineDied
from support.fakes.plain_matrices import keep_matrices_plain
from support.rigs.engine_rig import PROMPT, PROMPTS, SAMPLING, Rig, Weights, engine_rig
from support.rigs.waiting import LIMIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The reply goes on after all that a random model says.
ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["one worker a stage", "two workers a stage"],
)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    tensor_parallel = request.param
    with pytest.MonkeyPatch.context() as patch:
        # As on a GPU, so that updates are copied by plan, and received beside the live weights.
        keep_matrices_plain(patch)
        starting = engine_rig(
            tmp_path_factory.mktemp("model"),
            tensor_parallel_size=tensor_parallel,
            pipeline_parallel_size=2,
        )
        async with starting as rig:
            assert rig.engine.num_workers == 2 * tensor_parallel
            yield rig


async def sampled_gaps(rig: Rig, weights: Weights) -> np.ndarray:
    """How far the log-probabilities of sixteen replies are from those of `weights`."""
    replies = await rig.replies("r", [PROMPT] * 16, 40, SAMPLING)
    gaps = [rig.gap(weights, PROMPT, reply) for reply in replies]
    return np.concatenate(gaps)


async def test_stages_take_weights_and_sample_like_one_engine(rig) -> None:
    first = await rig.publish(rig.old, 0)
    gaps = await sampled_gaps(rig, rig.old)
    assert not first.stages.copied
    assert len(gaps) > 100
    assert gaps.max() <= 1e-3


async def test_each_stage_copies_its_own_layers_by_a_plan(rig) -> None:
    await rig.publish(rig.old, 0)
    second = await rig.publish(rig.new, 1)
    assert second.stages.copied
    gaps = await sampled_gaps(rig, rig.new)
    assert gaps.max() <= 1e-3


async def test_replies_cross_a_publish_with_two_batches_in_flight(rig) -> None:
    assert rig.engine.llm.vllm_config.max_concurrent_batches == 2
    await rig.publish(rig.old, 2)
    await rig.check_crossings(ENDLESS, 400)


async def test_a_probe_goes_through_all_stages(rig) -> None:
    await rig.publish(rig.new, 5)
    scored = await rig.engine.teacher_forced_logprobs(PROMPTS)
    expected = [rig.reference.logprobs(rig.new, prompt) for prompt in PROMPTS]
    gaps = np.abs(scored - np.concatenate(expected))
    assert gaps.max() <= 1e-3


async def test_what_was_not_tried_with_stages_is_off_and_told(rig) -> None:
    cause = "rollout_server.pipeline_parallel_size is over 1"
    features = (ATTENTION, SAMPLER, STEADY, CHUNKS)
    assert rig.engine.disabled_features == dict.fromkeys(features, cause)
    scheduler = rig.engine.llm.vllm_config.scheduler_config.scheduler_cls
    assert not issubclass(scheduler, ChunkingScheduler)


# Last in this file: the engine is gone afterwards.
async def test_the_end_of_a_stage_is_told_and_all_replies_fail(rig) -> None:
    await rig.publish(rig.old, 7)
    watching = asyncio.create_task(rig.engine.watch())
    replies = await rig.begun("k", 8, 40, ENDLESS)
    # The engine's own process comes first, then its workers by their ranks.
    rig.engine._processes[-1].kill()
    with pytest.raises(EngineDied):
        async with asyncio.timeout(LIMIT_S):
            await watching
    async with asyncio.timeout(LIMIT_S):
        ends = await asyncio.gather(*replies, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDied] * 8
