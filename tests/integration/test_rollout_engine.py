"""The real vLLM engine with a tiny model whose head is tied, against transformers; one engine."""

import asyncio
import dataclasses
import mmap
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.types import PolicyVersion
from slipstream.extensions.fast_decoding.server import chunking_scheduler
from slipstream.extensions.fast_decoding.server.arguments import ATTENTION, SAMPLER
from slipstream.extensions.fast_decoding.server.chunking_scheduler import (
    scheduler_class,
)
from slipstream.extensions.fast_decoding.server.steady_decoding import CHUNK_TOKENS
from slipstream.rollout_server.child_processes import store_url
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    Generation,
    GenerationFailed,
    RequestRefused,
    TextOptions,
)
from slipstream.rollout_server.vllm import engine, loader_update
from slipstream.rollout_server.vllm.engine_scheduler import EngineScheduler
from support.fakes.gloo_sender import GlooSender, layout_of
from support.rigs.engine_rig import PROMPT, SAMPLING, Rig, engine_rig
from support.rigs.started_engine import until_generated
from support.rigs.waiting import LIMIT_S
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The reply goes on after all that a random model says.
ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True)
# Memory that the engine's process shares: whether it repacks tied heads.
REPACKS = mmap.mmap(-1, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    # Fewer blocks than 16 long replies need: some are preempted and computed again.
    few = {"num_gpu_blocks_override": 20}
    REPACKS[0] = True
    repack = loader_update.repack_kept_linears
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loader_update,
            "repack_kept_linears",
            lambda model: REPACKS[0] and repack(model),
        )
        async with engine_rig(tmp_path_factory.mktemp("model"), engine=few) as rig:
            yield rig


async def turns_at_rest(rig: Rig) -> None:
    """Lets the engine's loop turn twenty times: each turn answers, and would make a step."""
    for _ in range(20):
        assert await rig.engine.llm.is_paused()


async def test_it_starts_paused_and_takes_its_first_weights(rig) -> None:
    waiting = asyncio.create_task(rig.generate("first"))
    await turns_at_rest(rig)
    assert not waiting.done()
    await rig.publish(rig.old, 0)
    generation = await waiting
    assert [span.version for span in generation.version_spans] == [PolicyVersion(0, 0)]


async def test_it_tells_which_features_it_does_without(rig) -> None:
    on_cpu = "the engine computes on a CPU"
    assert rig.engine.disabled_features == {ATTENTION: on_cpu, SAMPLER: on_cpu}


async def test_sampled_logprobs_equal_those_of_transformers(rig) -> None:
    await rig.publish(rig.old, 0)
    replies = await asyncio.gather(*(rig.generate(f"r{n}") for n in range(16)))
    gaps = np.concatenate([rig.gap(rig.old, PROMPT, reply) for reply in replies])
    assert len(gaps) > 100
    assert gaps.mean() <= 1e-4
    assert gaps.max() <= 1e-2


async def replies_of(rig: Rig, count: int, **sampling: object) -> list[Generation]:
    """Replies of up to 60 tokens, short and long ones, each with its values for every token."""
    settings = dataclasses.replace(ENDLESS, temperature=2.0, **sampling)
    replies = await asyncio.gather(
        *(rig.generate(f"r{n}", num_tokens=60, sampling=settings) for n in range(count))
    )
    assert {len(reply.token_ids) > CHUNK_TOKENS for reply in replies} == {True, False}
    for reply in replies:
        num_stamped = sum(span.length for span in reply.version_spans)
        assert len(reply.logprobs) == len(reply.token_ids) == num_stamped
    return replies


async def test_no_token_behind_a_stop_token_is_handed_out(rig) -> None:
    await rig.publish(rig.old, 0)
    stops = {7, 8}
    replies = await replies_of(rig, 32, stop_token_ids=tuple(stops))
    for reply in replies:
        *before, last = reply.token_ids.tolist()
        assert not stops & set(before)
        assert (last in stops) == (reply.finish_reason is FinishReason.STOP)
    assert FinishReason.STOP in {reply.finish_reason for reply in replies}


async def test_a_reply_ends_with_the_token_that_completes_a_text(rig) -> None:
    await rig.publish(rig.old, 0)
    greedy = dataclasses.replace(ENDLESS, temperature=0.0)
    tokens = (
        await rig.generate("endless", sampling=greedy, num_tokens=60)
    ).token_ids.tolist()
    for start in range(0, 40, 3):
        text = rig.renderer.decode_all(tokens[start : start + 3])
        expected = next(
            tokens[:n] for n in range(61) if text in rig.renderer.decode_all(tokens[:n])
        )
        stopping = dataclasses.replace(greedy, stop=("never said", text))
        reply = await rig.generate(f"stop-{start}", sampling=stopping, num_tokens=60)
        assert reply.token_ids.tolist() == expected
        assert reply.finish_reason is FinishReason.STOP


async def test_no_token_behind_a_text_is_handed_out_or_counted(rig) -> None:
    await rig.publish(rig.old, 0)
    before = rig.engine.requests.use()
    text = rig.renderer.decode_all([7, 8])
    stops = (text, "</s>")
    replies = await replies_of(rig, 48, stop=stops)
    for reply in replies:
        tokens = reply.token_ids.tolist()
        so_far = rig.renderer.decode_all(tokens[:-1])
        whole = rig.renderer.decode_all(tokens)
        assert not any(stop in so_far for stop in stops)
        is_stopped = any(stop in whole for stop in stops)
        assert is_stopped == (reply.finish_reason is FinishReason.STOP)
    use = rig.engine.requests.use()
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    assert use.generated_tokens - before.generated_tokens == num_tokens
    assert use.returned_tokens - before.returned_tokens == num_tokens
    gaps = np.concatenate(
        [
            np.abs(
                rig.reference.logprobs(rig.old, [*PROMPT, *tokens], temperature=2.0)[4:]
                - logprobs
            )
            for reply in replies
            for tokens, logprobs in [(reply.token_ids.tolist(), reply.logprobs)]
        ]
    )
    assert gaps.max() <= 1e-2


async def sample_as(rig, kind: str, parameters: dict[str, object]):
    """24 requests of the same seeds, all known to the engine before its first step."""
    await rig.engine.pauses.pause()
    waiting = []
    for number in range(24):
        settings = SamplingParams(
            seed=number,
            max_tokens=200 - number,
            ignore_eos=number % 4 != 0,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind[kind],
            **parameters,
        )
        collector = await rig.engine.llm.add_request(
            f"{kind}{number}", tokens_input([*PROMPT, 4 + number]), settings
        )
        waiting.append(asyncio.create_task(last_output(collector)))
    await rig.engine.pauses.resume(PolicyVersion(0, 0))
    return await asyncio.gather(*waiting)


async def last_output(collector):
    while not (output := await collector.get()).finished:
        pass
    return output


@pytest.mark.long_but("parameters0")
@pytest.mark.parametrize(
    "parameters", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}]
)
async def test_chunks_hold_exactly_what_vllm_hands_out_token_by_token(
    rig, parameters
) -> None:
    await rig.publish(rig.old, 0)
    ours = await sample_as(rig, "FINAL_ONLY", parameters)
    theirs = await sample_as(rig, "CUMULATIVE", parameters)
    assert sum(output.metrics.num_preemptions for output in ours) >= 2
    for our_reply, other in zip(ours, theirs, strict=True):
        (chunked,), (streamed,) = our_reply.outputs, other.outputs
        assert len(chunked.token_ids) == len(chunked.logprobs) > 1
        assert chunked.token_ids == streamed.token_ids
        assert chunked.logprobs.token_ids == streamed.logprobs.token_ids
        # Bit for bit.
        assert chunked.logprobs.logprobs == streamed.logprobs.logprobs
        assert chunked.weight_versions == streamed.weight_versions
        assert chunked.finish_reason == streamed.finish_reason
        assert our_reply.num_cached_tokens == other.num_cached_tokens


async def test_a_pause_hands_out_every_token_that_was_sampled(rig) -> None:
    await rig.publish(rig.old, 0)
    start = rig.engine.requests.use().generated_tokens
    replies = await rig.begun("p", 8, 64, ENDLESS)
    await rig.engine.pauses.pause()
    # A message may still be on its way: it comes before the answer to another call.
    await rig.engine.pauses.pause()
    handed_out = rig.engine.requests.use().generated_tokens - start
    for number in range(8):
        await rig.engine.requests.cancel(f"p{number}")
    generations = await asyncio.gather(*replies)
    assert sum(len(generation.token_ids) for generation in generations) == handed_out
    # Many lengths that are no multiple of a chunk: partly filled chunks came out.
    assert rig.gap(rig.old, PROMPT, generations[0]).mean() <= 1e-4
    await rig.engine.pauses.resume(PolicyVersion(0, 0))


async def test_outputs_of_another_vllm_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = set(EngineCoreOutput.__struct_fields__)
    assert scheduler_class(EngineScheduler)
    for handled, name in (
        (fields | {"old_thing"}, "old_thing"),
        (fields - {"events"}, "events"),
    ):
        monkeypatch.setattr(chunking_scheduler, "_FIELDS", handled)
        with pytest.raises(ConfigError, match=rf"differ from 0\.32\.0's in: {name}"):
            scheduler_class(EngineScheduler)


async def test_an_update_in_flight_is_stamped_where_the_weights_changed(rig) -> None:
    await rig.check_crossings(ENDLESS, 100)


@pytest.mark.parametrize("give_back", [False, True])
async def test_an_engine_rests_with_its_requests_and_goes_on_exactly(
    rig, give_back
) -> None:
    await rig.publish(rig.old, 3)
    replies = await rig.begun("rest", 8, 50, ENDLESS)
    await rig.engine.pauses.rest(give_back=give_back)
    late = asyncio.create_task(rig.generate("late", num_tokens=8, sampling=ENDLESS))
    # Tokens that were sampled before are still handed out.
    await turns_at_rest(rig)
    at_rest = rig.engine.requests.use().generated_tokens
    await turns_at_rest(rig)
    assert rig.engine.requests.use().generated_tokens == at_rest
    assert not late.done()
    await rig.engine.pauses.resume(PolicyVersion(0, 3))
    for reply in await asyncio.gather(*replies, late):
        assert {span.version for span in reply.version_spans} == {PolicyVersion(0, 3)}
        assert rig.gap(rig.old, PROMPT, reply).mean() <= 1e-4


async def test_no_cached_prefix_crosses_a_version(rig) -> None:
    prompt = [1, *(4 + n % 28 for n in range(150)), 3]
    await rig.publish(rig.old, 0)
    await rig.generate("warm", prompt, 4)
    again = await rig.generate("again", prompt, 4)
    assert again.cached_tokens >= 128
    await rig.publish(rig.new, 1)
    after = await rig.generate("after", prompt, 4)
    assert after.cached_tokens == 0
    assert rig.gap(rig.new, prompt, after).mean() <= 1e-4


async def test_the_probe_shows_a_tied_head_that_stayed_old(rig) -> None:
    sequences = [
        [1, 4, 9, 13, 22, 30, 5],
        [1, 7, 7, 8],
        [1, *range(4, 32), *range(4, 30)],
    ]

    async def gap() -> float:
        scores = await rig.engine.teacher_forced_logprobs(sequences)
        expected = [rig.reference.logprobs(rig.new, sequence) for sequence in sequences]
        return float(np.abs(scores - np.concatenate(expected)).mean())

    await rig.publish(rig.old, 0)
    try:
        REPACKS[0] = False
        await rig.publish(rig.new, 1)
        assert await gap() > 1e-1
    finally:
        REPACKS[0] = True
    await rig.publish(rig.new, 2)
    assert await gap() <= 1e-4


async def test_probes_do_not_count_as_generated(rig) -> None:
    await rig.publish(rig.old, 0)
    before = rig.engine.requests.use().generated_tokens
    scores = await rig.engine.teacher_forced_logprobs([[1, 4, 5], [1, 6]])
    assert len(scores) == 3
    await rig.generate("counted", num_tokens=1)
    assert rig.engine.requests.use().generated_tokens == before + 1


async def test_cancelled_requests_are_counted_to_the_token(rig) -> None:
    await rig.publish(rig.old, 0)
    before = rig.engine.requests.use()
    replies = await rig.begun("cancel", 24, 100, ENDLESS)
    for number in range(0, 24, 2):
        await rig.engine.requests.cancel(f"cancel{number}")
    await rig.engine.requests.cancel("unknown")
    # Half of them are cancelled while the engine is paused: its queue must not hold them.
    await rig.engine.pauses.pause()
    for number in range(1, 24, 4):
        await rig.engine.requests.cancel(f"cancel{number}")
    await rig.engine.pauses.resume(PolicyVersion(0, 1))
    generations = await asyncio.gather(*replies)
    assert sum(g.finish_reason is FinishReason.CANCELLED for g in generations) >= 8
    tokens = sum(len(generation.token_ids) for generation in generations)
    # A further request: what the engine had still in hand would have come before it.
    tokens += len((await rig.generate("last", num_tokens=1)).token_ids)
    after = rig.engine.requests.use()
    assert after.generated_tokens - before.generated_tokens == tokens
    assert after.returned_tokens - before.returned_tokens == tokens
    assert after.open_requests == 0


async def test_a_request_that_cannot_be_served_fails_alone(rig) -> None:
    await rig.publish(rig.old, 0)
    with pytest.raises(GenerationFailed):
        await rig.generate("long", [4] * 400)
    # The request's client is at fault.
    with pytest.raises(RequestRefused):
        await rig.generate("none", num_tokens=0)
    vocabulary = rig.engine.llm.model_config.get_vocab_size()
    with pytest.raises(
        RequestRefused, match=f"token {vocabulary}: the model has {vocabulary} "
    ):
        await rig.generate("unknown", [4, vocabulary])
    for options in (TextOptions(num_logprobs=10**9), TextOptions(stop=("\ud800",))):
        with pytest.raises(RequestRefused):
            async for _ in rig.engine.requests.stream(
                "odd", [4], SAMPLING, 1, options=options
            ):
                pass
    assert len((await rig.generate("short", num_tokens=1)).token_ids) == 1


async def test_a_failed_transfer_can_be_followed_by_a_good_one(rig) -> None:
    await rig.publish(rig.old, 0)
    layout = layout_of(rig.new)
    await rig.engine.pauses.pause()

    absent = GlooSender("absent", join_deadline_s=0.5)
    with pytest.raises(WeightSyncError, match="could not join"):
        await rig.receive(absent.order("p", 1), layout)

    breaking = GlooSender("breaking", deadline_s=0.5)
    order = breaking.order("p", 1)
    sending = asyncio.create_task(
        asyncio.to_thread(breaking.send, layout, rig.new, max_buckets=3)
    )
    with pytest.raises(WeightSyncError, match="did not arrive"):
        await rig.receive(order, layout)
    # On a busy machine, its own deadline may have passed before.
    await asyncio.gather(sending, return_exceptions=True)

    # Without the communicator that broke, an order that builds on it fails at once.
    with pytest.raises(WeightSyncError, match="not a member"):
        await rig.receive(breaking.order("p", 1), layout)

    strange = GlooSender("strange")
    unknown = rig.new | {"model.layers.7.mlp.up_proj.weight": torch.zeros(4, 4)}
    sending = asyncio.create_task(
        asyncio.to_thread(strange.send, layout_of(unknown), unknown)
    )
    with pytest.raises(WeightSyncError):
        await rig.receive(strange.order("p", 1), layout_of(unknown))
    await sending

    partial = GlooSender("partial")
    some = dict(list(rig.new.items())[:-2])
    sending = asyncio.create_task(
        asyncio.to_thread(partial.send, layout_of(some), some)
    )
    with pytest.raises(WeightSyncError, match="left out"):
        await rig.receive(partial.order("p", 1), layout_of(some))
    await sending

    rig.sender = None
    await rig.publish(rig.new, 1)
    reply = await rig.generate("after")
    assert rig.gap(rig.new, PROMPT, reply).mean() <= 1e-4


@pytest.mark.long
async def test_an_engine_whose_processes_stand_still_is_noticed(
    rig, monkeypatch
) -> None:
    await rig.publish(rig.old, 0)
    monkeypatch.setattr(engine, "SILENCE_LIMIT_S", 1.0)
    before = rig.engine.requests.use().generated_tokens
    replies = [
        asyncio.create_task(rig.generate("stopped", num_tokens=200, sampling=ENDLESS))
    ]
    # The engine told of its steps until now, so it is not silent yet.
    watching = asyncio.create_task(rig.engine.watch())
    await until_generated(rig.engine, before + 16, replies)
    for process in rig.engine._processes:
        process.suspend()
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(
                EngineDied, match="made no step for 1 s, with 1 open requests"
            ):
                await watching
    finally:
        for process in rig.engine._processes:
            process.resume()
    assert len((await replies[0]).token_ids) == 200


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "killed"])
async def test_whoever_ends_an_engine_removes_its_files(
    is_killed, tmp_path, monkeypatch
):
    # A short path: those of sockets have a limit.
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    async with engine_rig(tmp_path) as rig:
        (folder,) = temporary.glob("slipstream-sockets-*")
        assert any(path.is_socket() for path in folder.iterdir())
        assert Path(store_url(folder).removeprefix("file://")).exists()
        for process in rig.engine._processes if is_killed else ():
            process.kill()
    leftovers = [
        path
        for path in temporary.iterdir()
        if not path.name.startswith("torchinductor_")
    ]
    shutil.rmtree(temporary)
    assert leftovers == []
