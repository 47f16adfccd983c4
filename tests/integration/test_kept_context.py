"""Replies that go on with what older weights computed of them (`recompute_context = false`)."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from slipstream.core.types import PolicyVersion
from support.rigs.engine_rig import PROMPT, SAMPLING, Rig, engine_rig
from support.rigs.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True)
# Nine blocks and a rest.
LONG_PROMPT = [1, *(4 + n % 28 for n in range(150)), 3]
CACHED_TOKENS = 128


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with engine_rig(
        tmp_path_factory.mktemp("model"), recompute_context=False
    ) as rig:
        yield rig


async def cached_tokens(rig: Rig, name: str) -> int:
    return (await rig.generate(name, LONG_PROMPT, 2)).cached_tokens


async def test_replies_go_on_with_the_context_that_older_weights_computed(
    rig: Rig,
) -> None:
    await rig.publish(rig.old, 1)
    replies = await rig.begun("kept", 4, 80, ENDLESS)
    await rig.publish(rig.new, 2)
    crossed = 0
    for reply in await asyncio.gather(*replies):
        first, *later_spans = reply.version_spans
        assert first.version == PolicyVersion(0, 1)
        assert rig.gap(rig.old, PROMPT, reply)[: first.length].mean() <= 1e-4
        for span in later_spans:
            crossed += 1
            assert span.version == PolicyVersion(0, 2)
            # The reply fits neither the old nor the new weights alone.
            assert rig.gap(rig.old, PROMPT, reply)[first.length :].mean() > 0.1
            assert rig.gap(rig.new, PROMPT, reply)[first.length :].mean() > 0.01
    assert crossed >= 2


async def test_cached_prefixes_serve_no_request_of_a_newer_version(rig: Rig) -> None:
    await rig.publish(rig.old, 3)
    assert await cached_tokens(rig, "before") == 0
    assert await cached_tokens(rig, "again") >= CACHED_TOKENS
    # Nothing is forgotten while these run.
    replies = await rig.begun("running", 4, 80, ENDLESS)
    await rig.publish(rig.new, 4)
    fresh = await rig.generate("fresh", LONG_PROMPT, 20)
    assert fresh.cached_tokens == 0
    assert rig.gap(rig.new, LONG_PROMPT, fresh).mean() <= 1e-4
    assert await cached_tokens(rig, "of the new version") >= CACHED_TOKENS
    await asyncio.gather(*replies)


async def test_a_request_that_comes_during_an_update_is_served_by_the_new_weights_alone(
    rig: Rig,
):
    await rig.publish(rig.old, 7)
    await cached_tokens(rig, "older")
    replies = await rig.begun("meanwhile", 4, 80, ENDLESS)
    resume = rig.engine.pauses.resume
    late = []

    async def resume_later(version: PolicyVersion) -> None:
        late.append(asyncio.create_task(rig.generate("late", LONG_PROMPT, 20)))
        await until(lambda: "late" in rig.engine.pauses._held)
        await resume(version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.engine.pauses, "resume", resume_later)
        await rig.publish(rig.new, 8)
    reply = await late[0]
    assert [span.version for span in reply.version_spans] == [PolicyVersion(0, 8)]
    assert reply.cached_tokens == 0
    assert rig.gap(rig.new, LONG_PROMPT, reply).mean() <= 1e-4
    await asyncio.gather(*replies)


async def test_a_pause_without_an_update_forgets_everything(rig: Rig) -> None:
    await rig.publish(rig.old, 5)
    await cached_tokens(rig, "cached")
    replies = await rig.begun("paused", 4, 80, ENDLESS)
    await rig.engine.pauses.pause()
    # The same version: weights that were found wrong are sent again under their own number.
    await rig.engine.pauses.resume(PolicyVersion(0, 5))
    assert await cached_tokens(rig, "after") == 0
    for reply in await asyncio.gather(*replies):
        assert rig.gap(rig.old, PROMPT, reply).mean() <= 1e-4
