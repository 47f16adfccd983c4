"""What an engine is told around an update, when it lets requests in, and when it counts as dead.

vLLM only notes it.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.role_sections import LoraSection
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.buckets import TensorSpec, layout_to_pb
from slipstream.rollout_server.engine_interface import (
    EngineDied,
    FinishReason,
    Sampling,
)
from slipstream.rollout_server.vllm import engine, engine_pause
from slipstream.rollout_server.vllm.engine import VllmEngine
from slipstream.rollout_server.vllm.engine_requests import TokenCounter
from slipstream.v1 import weights_pb2
from support.rigs.waiting import LIMIT_S

SAMPLING = Sampling(1.0, 1.0, 0, max_reply_tokens=4, max_turns=1, max_episode_tokens=8)
LAYOUT = layout_to_pb([TensorSpec("a", "bfloat16", (4,))], bucket_bytes=1024)
RESULT = {"digests": ["0a"], "by_plan": True, "has_plan": True}
RESULT |= {"receive_s": 0.0, "load_s": 0.0, "wire_s": 0.0, "began_s": 0.0}


class NotedCalls:
    """Stands for AsyncLLM: notes when it is called; `arrived` lets an update's buckets come."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.errored = False
        self.arrived = asyncio.Event()
        self.arrived.set()
        self.takes_requests = asyncio.Event()
        self.takes_requests.set()
        self.answer: dict[str, Any] = {"value": RESULT}
        parallel = SimpleNamespace(world_size=1)
        self.vllm_config = SimpleNamespace(lora_config=None, parallel_config=parallel)
        self.model_config = SimpleNamespace(
            model="model",
            max_model_len=64,
            get_num_experts=lambda: 0,
            get_vocab_size=lambda: 100,
        )
        self.logger_manager = SimpleNamespace(stat_loggers=[TokenCounter(None)])
        self.engine_core = self
        # An order that comes before an update waits behind it, as where a step is under way.
        self.answers_behind_update = False

    async def pause_scheduler_async(self, **_: object) -> None:
        self.noted.append("pause")
        await self._behind_update()

    async def reset_prefix_cache_async(self, *are_reset_too: bool) -> bool:
        # Running requests and the connector.
        assert are_reset_too == (True, True)
        self.noted.append("discard")
        await self._behind_update()
        return True

    async def update_weight_version(self, stamp: str) -> None:
        self.noted.append(f"version {stamp}")
        await self._behind_update()

    async def resume_generation(self) -> None:
        self.noted.append("resume")

    async def sleep_async(self, level: int, mode: str) -> None:
        self.noted.append(f"sleep {level} {mode}")

    async def wake_up_async(self, tags: list[str] | None) -> None:
        self.noted.append(f"wake {'the rest' if tags is None else ' '.join(tags)}")

    async def collective_rpc(self, method: str, args: tuple[object, ...]) -> list[Any]:
        assert method == "slipstream_call"
        name, *_ = args
        if name == "prepare":
            return [{"value": True}]
        self.noted.append(str(name))
        if name == "begin":
            return [{"value": None}]
        await self.arrived.wait()
        return [self.answer]

    async def add_request(self, request_id: str, *_: object, **__: object) -> object:
        await self.takes_requests.wait()
        self.noted.append(f"request {request_id}")
        return SimpleNamespace(get=asyncio.Event().wait)

    async def _behind_update(self) -> None:
        if self.answers_behind_update:
            await self.arrived.wait()

    async def abort(self, request_id: str) -> None:
        self.noted.append(f"abort {request_id}")


class Rig:
    """An engine that has a plan for its copies and serves version 1."""

    def __init__(self) -> None:
        self.llm = NotedCalls()
        server = SimpleNamespace(recompute_context=True)
        config = SimpleNamespace(
            lora=LoraSection(),
            rollout_server=server,
            may_stage=False,
            replays_sampling=False,
        )
        self.engine = VllmEngine(self.llm, [], config)
        self.requests: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self.prepare(1)
        await self.engine.receive_weights("p1")
        await self.engine.pauses.resume(PolicyVersion(0, 1))
        del self.llm.noted[:]

    async def prepare(self, step: int) -> None:
        order = weights_pb2.PublishOrder(
            publish_id=f"p{step}",
            version=version_to_pb(PolicyVersion(0, step)),
            bucket_deadline_s=LIMIT_S,
            join_deadline_s=LIMIT_S,
        )
        await self.engine.prepare_weights(order, LAYOUT, 1)

    async def update(self, step: int) -> None:
        await self.prepare(step)
        await self.engine.receive_weights(f"p{step}")

    async def ask(self, request_id: str) -> None:
        """A request that comes as far as it can."""
        task = asyncio.create_task(
            self.engine.requests.generate(request_id, [1], SAMPLING, 4)
        )
        self.requests.append(task)
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    for request in rig.requests:
        request.cancel()
    await asyncio.gather(*rig.requests, return_exceptions=True)


async def test_the_first_update_ends_no_pause_of_its_own() -> None:
    rig = Rig()
    await rig.update(1)
    assert rig.llm.noted == ["pause", "receive"]
    await rig.engine.pauses.resume(PolicyVersion(0, 1))
    assert rig.llm.noted[2:] == ["version 0:1", "resume"]


async def test_an_idle_engine_is_told_everything_at_once_and_lets_nothing_in_before_the_verdict(
    rig: Rig,
) -> None:
    await rig.prepare(2)
    rig.llm.arrived.clear()
    receiving = asyncio.create_task(rig.engine.receive_weights("p2"))
    await rig.ask("early")
    # The engine is not paused again: a pause would wait for the device, so for the last bucket.
    all_calls = ["begin", "discard", "version 0:2", "resume", "receive"]
    assert rig.llm.noted == all_calls
    rig.llm.arrived.set()
    await receiving
    await rig.ask("later")
    assert rig.llm.noted == all_calls
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    await rig.ask("last")
    assert rig.llm.noted == [
        *all_calls,
        "request early",
        "request later",
        "request last",
    ]


async def test_a_probe_is_held_back_too(rig: Rig) -> None:
    await rig.update(2)
    probing = asyncio.create_task(rig.engine.teacher_forced_logprobs([[1, 2]]))
    rig.requests.append(probing)
    await rig.ask("other")
    assert not any(noted.startswith("request") for noted in rig.llm.noted)
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    await rig.ask("last")
    assert sorted(rig.llm.noted[-3:]) == [
        "request last",
        "request other",
        "request probe/0",
    ]


async def test_requests_that_run_go_on_only_when_the_update_was_judged(
    rig: Rig,
) -> None:
    await rig.ask("running")
    await rig.update(2)
    assert rig.llm.noted == ["request running", "pause", "begin", "receive"]
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    assert rig.llm.noted[4:] == ["version 0:2", "resume"]


@pytest.mark.parametrize("requests", [[], ["running"]], ids=["idle", "busy"])
async def test_an_answer_that_waits_behind_an_update_may_take_as_long_as_that(
    rig: Rig, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for request in requests:
        await rig.ask(request)
    await rig.prepare(2)
    # Nothing is left but the time of the update.
    monkeypatch.setattr(engine_pause, "ANSWER_LIMIT_S", 0.0)
    rig.llm.answers_behind_update = True
    rig.llm.arrived.clear()
    receiving = asyncio.create_task(rig.engine.receive_weights("p2"))
    await rig.ask("later")
    assert not receiving.done()
    rig.llm.arrived.set()
    await receiving


async def test_after_a_failed_update_an_idle_engine_is_paused_before_it_lets_anything_in(
    rig: Rig,
):
    rig.llm.answer = {"error": "a bucket did not arrive"}
    await rig.prepare(2)
    with pytest.raises(WeightSyncError, match="a bucket did not arrive"):
        await rig.engine.receive_weights("p2")
    await rig.ask("waiting")
    del rig.llm.noted[:]
    await rig.engine.pauses.pause()
    await rig.ask("later")
    assert rig.llm.noted == ["pause", "request waiting", "request later"]
    # The pause before has not been ended.
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    assert rig.llm.noted[3:] == ["version 0:2", "resume"]


async def test_a_request_that_is_cancelled_while_it_is_held_back_ends_at_once(
    rig: Rig,
) -> None:
    await rig.update(2)
    await rig.ask("held")
    await rig.engine.requests.cancel("held")
    async with asyncio.timeout(LIMIT_S):
        generation = await rig.requests[0]
    assert generation.finish_reason is FinishReason.CANCELLED
    assert not len(generation.token_ids)
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    await rig.ask("other")
    # The engine never heard of it.
    assert rig.llm.noted[-1] == "request other"
    assert "request held" not in rig.llm.noted


async def test_a_request_that_is_cancelled_on_its_way_to_the_engine_ends_there(
    rig: Rig,
) -> None:
    rig.llm.takes_requests.clear()
    await rig.ask("late")
    await rig.engine.requests.cancel("late")
    rig.llm.takes_requests.set()
    await rig.ask("other")
    assert rig.llm.noted == [
        "abort late",
        "request late",
        "abort late",
        "request other",
    ]


async def test_an_engine_that_rests_is_not_busy(rig: Rig) -> None:
    await rig.ask("running")
    await rig.engine.pauses.rest(give_back=False)
    assert rig.engine.requests.use().busy_s == rig.engine.requests.use().busy_s
    assert rig.engine.requests.use().paused_s > 0


async def test_an_engine_that_rests_keeps_its_version_and_lets_requests_wait_inside(
    rig: Rig,
):
    await rig.ask("running")
    await rig.engine.pauses.rest(give_back=False)
    await rig.ask("later")
    assert rig.llm.noted == ["request running", "pause", "request later"]
    await rig.engine.pauses.resume(PolicyVersion(0, 1))
    assert rig.llm.noted[3:] == ["version 0:1", "resume"]


async def test_memory_that_was_given_back_comes_weights_first_and_the_rest_with_the_version(
    rig,
):
    await rig.ask("running")
    await rig.engine.pauses.rest(give_back=True)
    assert rig.llm.noted[1:] == ["sleep 1 keep"]
    await rig.update(2)
    # Cached keys and values take their memory when the learner has sent its weights.
    assert rig.llm.noted[2:] == ["wake weights", "pause", "begin", "receive"]
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    assert rig.llm.noted[6:] == ["version 0:2", "wake the rest"]
    # Now all memory is there.
    await rig.update(3)
    await rig.engine.pauses.resume(PolicyVersion(0, 3))
    assert rig.llm.noted[8:] == ["pause", "begin", "receive", "version 0:3", "resume"]


async def test_an_idle_engine_that_gave_its_memory_back_has_it_before_it_takes_requests(
    rig: Rig,
):
    await rig.engine.pauses.rest(give_back=True)
    await rig.update(2)
    await rig.ask("early")
    resuming = ["begin", "discard", "version 0:2", "wake the rest", "receive"]
    assert rig.llm.noted == ["sleep 1 keep", "wake weights", *resuming]
    await rig.engine.pauses.resume(PolicyVersion(0, 2))
    await rig.ask("last")
    assert rig.llm.noted[7:] == ["request early", "request last"]


async def test_an_idle_engine_at_rest_discards_what_old_weights_have_computed(
    rig: Rig,
) -> None:
    await rig.engine.pauses.rest(give_back=False)
    await rig.update(2)
    assert rig.llm.noted == [
        "pause",
        "begin",
        "discard",
        "version 0:2",
        "resume",
        "receive",
    ]


async def test_an_engine_without_new_weights_takes_all_its_memory_at_once(
    rig: Rig,
) -> None:
    await rig.engine.pauses.rest(give_back=True)
    await rig.engine.pauses.resume(PolicyVersion(0, 1))
    assert rig.llm.noted == ["sleep 1 keep", "version 0:1", "wake the rest"]


async def test_an_engine_that_does_not_pause_or_resume_is_taken_for_dead(
    rig, monkeypatch
) -> None:
    monkeypatch.setattr(engine_pause, "ANSWER_LIMIT_S", 0.01)
    rig.llm.answers_behind_update = True
    rig.llm.arrived.clear()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(
            EngineDied, match=r"neither paused nor resumed within 0\.01 s"
        ):
            await rig.engine.pauses.pause()
        with pytest.raises(
            EngineDied, match=r"neither paused nor resumed within 0\.01 s"
        ):
            await rig.engine.pauses.resume(PolicyVersion(0, 1))


async def test_an_engine_that_generates_no_more_is_taken_for_dead(
    rig: Rig, monkeypatch
) -> None:
    monkeypatch.setattr(engine, "SILENCE_LIMIT_S", 0.05)
    async with asyncio.timeout(LIMIT_S):
        await rig.engine.pauses.pause()
        await rig.ask("r")
        # Before an order to resume, the engine need not take a step.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await rig.engine.watch()
        await rig.engine.pauses.resume(PolicyVersion(0, 1))
        with pytest.raises(
            EngineDied, match=r"made no step for 0\.05 s, with 1 open requests"
        ):
            await rig.engine.watch()
        rig.requests[0].cancel()
        await asyncio.wait(rig.requests)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await rig.engine.watch()
