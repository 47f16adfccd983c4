"""A real engine that is sent weights and adapters apart, against transformers with both merged."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from slipstream.core.errors import WeightSyncError
from slipstream.core.types import PolicyVersion
from support.fakes.plain_matrices import keep_matrices_plain
from support.fakes.small_configs import config_of_engine
from support.fakes.tiny_models import make_model_folder
from support.rigs.adapter_engine import RANK, SAMPLING, SEQUENCE, Rig, adapters_for
from support.rigs.started_engine import become_a_server, started_engine, until_generated

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Kind:
    """Whether matrices are prepacked, or copied by a plan as on a GPU; workers and stages."""

    packs: bool
    tensor_parallel: int = 1
    stages: int = 1


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(Kind(packs=True), id="packed"),
        pytest.param(Kind(packs=False), id="plain"),
        pytest.param(
            Kind(packs=False, tensor_parallel=2),
            id="two-workers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Kind(packs=False, stages=2), id="two-stages", marks=pytest.mark.slow
        ),
    ],
)
async def rig(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    """One engine of each kind."""
    kind: Kind = request.param
    folder = make_model_folder(
        tmp_path_factory.mktemp("model"),
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    lora = {"rank": RANK, "alpha": 7.0, "publish": "adapters"}
    server = {
        "tensor_parallel_size": kind.tensor_parallel,
        "pipeline_parallel_size": kind.stages,
    }
    config = config_of_engine(folder, lora=lora, rollout_server=server)
    become_a_server(config)
    base = load_file(folder / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        if not kind.packs:
            keep_matrices_plain(patch)
        async with started_engine(config) as engine:
            yield Rig(engine, folder, base, has_plan=not kind.packs)


async def test_adapters_alone_are_refused_before_any_weights(rig: Rig) -> None:
    with pytest.raises(WeightSyncError, match="weights before them did not arrive"):
        await rig.publish({}, adapters_for(rig.base, 1), deadline_s=1.0)
    rig.sender = None


async def test_the_engine_computes_with_what_came_last(rig: Rig) -> None:
    generator = torch.Generator().manual_seed(9)
    other = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in rig.base.items()
    }
    first, second, third = (adapters_for(rig.base, seed) for seed in (1, 2, 3))
    assert not (await rig.publish(other, first)).stages.copied
    assert await rig.gap(other, first) < 1e-4
    assert await rig.gap(other, {}) > 1e-2
    assert (await rig.publish({}, second)).stages.copied
    assert await rig.gap(other, second) < 1e-4
    assert await rig.gap(other, first) > 1e-2
    # A server that may have lost both gets both.
    assert (await rig.publish(rig.base, third)).stages.copied == rig.has_plan
    assert await rig.gap(rig.base, third) < 1e-4
    await rig.publish({}, first)
    assert await rig.gap(rig.base, first) < 1e-4


async def test_replies_go_on_with_new_adapters_and_say_where_these_began(
    rig: Rig,
) -> None:
    await rig.publish(rig.base, adapters_for(rig.base, 1))
    before = rig.engine.requests.use().generated_tokens
    replies = [
        asyncio.create_task(
            rig.engine.requests.generate(f"r{n}", SEQUENCE, SAMPLING, 200)
        )
        for n in range(8)
    ]
    await until_generated(rig.engine, before + 64, replies)
    second = adapters_for(rig.base, 2)
    await rig.publish({}, second)
    version = PolicyVersion(0, rig.publishes)
    for reply in await asyncio.gather(*replies):
        assert reply.version_spans[-1].version == version
        new = reply.version_spans[-1].length
        assert len(reply.version_spans) == 2
        assert 0 < new < len(reply.token_ids)
        tokens = SEQUENCE + reply.token_ids.tolist()
        gaps = np.abs(
            rig.expected(rig.base, second, tokens)[-new:] - reply.logprobs[-new:]
        )
        assert gaps.mean() < 1e-4


async def test_a_reply_brings_the_log_probabilities_of_its_prompt(rig: Rig) -> None:
    await rig.publish(rig.base, adapters_for(rig.base, 1))
    scored = dataclasses.replace(SAMPLING, prompt_logprobs=True)
    for adapters, by_start in ((adapters_for(rig.base, 1), False), ({}, True)):
        sampling = dataclasses.replace(scored, by_start=by_start)
        reply = await rig.engine.requests.generate("p", SEQUENCE, sampling, 3)
        assert len(reply.token_ids) == 3
        expected = rig.expected(rig.base, adapters, SEQUENCE)
        assert np.abs(expected - reply.prompt_logprobs).mean() < 1e-4


async def test_the_start_replies_beside_the_adapters(rig: Rig) -> None:
    first = adapters_for(rig.base, 1)
    await rig.publish(rig.base, first)
    prompt = [(3 * n) % 20 + 4 for n in range(40)]
    by_start = dataclasses.replace(SAMPLING, by_start=True)
    generate = rig.engine.requests.generate
    replies = await asyncio.gather(
        *(generate(f"start{n}", prompt, by_start, 60) for n in range(2)),
        *(generate(f"policy{n}", prompt, SAMPLING, 60) for n in range(2)),
    )
    # No prefix that the other one has cached is taken either.
    later = (
        await generate("start", prompt, by_start, 60),
        await generate("p", prompt, SAMPLING, 60),
    )
    by_adapters = [{}, {}, first, first, {}, first]
    for reply, adapters in zip((*replies, *later), by_adapters, strict=True):
        tokens = prompt + reply.token_ids.tolist()
        gaps = np.abs(rig.expected(rig.base, adapters, tokens)[-60:] - reply.logprobs)
        assert gaps.mean() < 1e-4
        other = rig.expected(rig.base, {} if adapters else first, tokens)[-60:]
        assert np.abs(other - reply.logprobs).mean() > 1e-2


async def test_no_cached_prefix_crosses_adapters(rig: Rig) -> None:
    await rig.publish(rig.base, adapters_for(rig.base, 1))
    prompt = [(3 * n) % 20 + 4 for n in range(200)]
    cached = [
        (await rig.engine.requests.generate(f"c{n}", prompt, SAMPLING, 2))
        for n in range(2)
    ]
    assert cached[1].cached_tokens > 0
    await rig.publish({}, adapters_for(rig.base, 2))
    assert (
        await rig.engine.requests.generate("c2", prompt, SAMPLING, 2)
    ).cached_tokens == 0


async def test_adapters_that_do_not_fit_are_refused_and_the_next_ones_are_not(
    rig: Rig,
) -> None:
    good = adapters_for(rig.base, 1)
    await rig.publish(rig.base, good)
    missing = {
        name: tensor
        for name, tensor in good.items()
        if "layers.1.mlp.up_proj" not in name
    }
    half = {
        name: tensor
        for name, tensor in good.items()
        if "1.mlp.up_proj.lora_B" not in name
    }
    for wrong in (missing, half):
        with pytest.raises(
            WeightSyncError, match=r"do not fit, model.layers.1.mlp.up_proj"
        ):
            await rig.publish({}, wrong)
    large = {
        name: tensor.repeat(3, 1) if "lora_A" in name else tensor.repeat(1, 3)
        for name, tensor in good.items()
    }
    with pytest.raises(
        WeightSyncError, match="rank 12 arrived, the engine has room for 8"
    ):
        await rig.publish({}, large)
    second = adapters_for(rig.base, 2)
    await rig.publish({}, second)
    assert await rig.gap(rig.base, second) < 1e-4


async def test_adapters_of_which_not_all_arrive_are_sent_again(rig: Rig) -> None:
    await rig.publish(rig.base, adapters_for(rig.base, 1))
    with pytest.raises(WeightSyncError, match="did not arrive"):
        await rig.publish({}, adapters_for(rig.base, 2), most=1, deadline_s=1.0)
    rig.sender = None
    # The matrices are those from before.
    third = adapters_for(rig.base, 3)
    await rig.publish({}, third)
    assert await rig.gap(rig.base, third) < 1e-4


async def test_after_half_a_set_of_matrices_adapters_alone_are_refused(
    rig: Rig,
) -> None:
    adapters = adapters_for(rig.base, 1)
    await rig.publish(rig.base, adapters)
    with pytest.raises(WeightSyncError, match="did not arrive"):
        await rig.publish(rig.base, adapters, most=2, deadline_s=1.0)
    rig.sender = None
    with pytest.raises(WeightSyncError, match="weights before them did not arrive"):
        await rig.publish({}, adapters, deadline_s=1.0)
    rig.sender = None
    await rig.publish(rig.base, adapters)
    assert await rig.gap(rig.base, adapters) < 1e-4
