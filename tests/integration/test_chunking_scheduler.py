"""Our schedulers beside vLLM's own, in lock step, with a model that is a table of numbers.

The asynchronous one needs no GPU here: two steps are under way at one time, as in vLLM's engine.
"""

import random
import re
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slipstream.core.extension import installed
from slipstream.extensions.fast_decoding.server import chunking_scheduler
from slipstream.extensions.fast_decoding.server.prompt_gathering import PromptGathering
from slipstream.extensions.fast_decoding.server.steady_decoding import (
    STEADY,
    Chunk,
    unsteady_cause,
)
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from slipstream.rollout_server.vllm.engine_scheduler import scheduler_class
from support.fakes.small_configs import small_config
from support.fakes.tiny_models import SMALLEST, make_model_folder
from support.rigs.scheduler_loop import BLOCK, LIMITS, PROMPT, Engine, add, scheduler_of
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.request import RequestStatus


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - vLLM's
    folder = make_model_folder(tmp_path_factory.mktemp("model"), **SMALLEST)
    config = small_config(
        model={"path": str(folder), "dtype": "float32"},
        sampling={"max_reply_tokens": 64, "max_episode_tokens": 96},
        rollout_server={
            "max_episodes": 8,
            "enforce_eager": True,
            "engine": {"block_size": BLOCK},
        },
    )
    return engine_config(config, seed=0)


StartEngine = Callable[..., Engine]


@pytest.fixture
def pair(start: StartEngine) -> Callable[..., tuple[Engine, Engine]]:
    """Returns what starts an engine with our scheduler, and one with vLLM's."""
    return lambda **kinds: (start(ours=True, **kinds), start(ours=False, **kinds))


@pytest.fixture
def start(settings: Any) -> StartEngine:  # noqa: ANN401 - vLLM's
    def start(
        *,
        ours: bool,
        overlapping: bool,
        num_blocks: int = 100,
        windowed: bool = False,
        newer_runner: bool = False,
        keeps_sets: bool = False,
    ) -> Engine:
        plain = AsyncScheduler if overlapping else Scheduler
        cls = (
            scheduler_class(installed(), async_scheduling=overlapping)
            if ours
            else plain
        )
        settings.model_config.return_sampling_mask = keeps_sets
        scheduler = scheduler_of(cls, settings, num_blocks, 24 if windowed else None)
        # vLLM's choice on GPUs; plans differ.
        scheduler.use_v2_model_runner = newer_runner
        return Engine(scheduler, 2 if overlapping else 1)

    return start


SEEDS = 3

both = pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])


@both
@pytest.mark.parametrize("num_blocks", [100, 10], ids=["roomy", "preempting"])
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "windowed"])
@pytest.mark.parametrize(
    "newer_runner", [False, True], ids=["older-runner", "newer-runner"]
)
@pytest.mark.parametrize("keeps_sets", [False, True], ids=["all-tokens", "kept-tokens"])
def test_every_plan_and_reply_is_that_of_vllms_scheduler(
    pair,
    overlapping: bool,
    num_blocks: int,
    windowed: bool,
    newer_runner: bool,
    keeps_sets: bool,
) -> None:
    kinds = {
        "windowed": windowed,
        "newer_runner": newer_runner,
        "keeps_sets": keeps_sets,
    }
    ours, theirs = pair(overlapping=overlapping, num_blocks=num_blocks, **kinds)
    own_plans = counted_plans(ours)
    for engine in (ours, theirs):
        for number, limit in enumerate(LIMITS):
            # Two end at a token before their limit.
            ends = {"stop_token_ids": [129]} if number == 5 else {}
            add(engine, f"r{number}", limit, eos=131 if number == 6 else None, **ends)
        for step in range(30):
            engine.step()
            if step == 20:
                # All that is under way is computed again.
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        # The prompts' beginning is in the cache, of the second one all but its last token.
        for number, length in enumerate((12, 7)):
            # The first one would be longer than the model's longest sequence.
            limit = 200 if number == 0 else 20
            add(
                engine,
                f"later{number}",
                limit,
                prompt=[*PROMPT, *range(110, 110 + length)],
            )
        engine.drain()
    assert len(ours.plans) == len(theirs.plans) > 60
    assert (len(own_plans) > 30) is not windowed
    for our_plan, other in zip(ours.plans, theirs.plans, strict=True):
        assert our_plan == other
    assert ours.tokens == theirs.tokens
    assert ours.logprobs == theirs.logprobs
    assert ours.kept_sets == theirs.kept_sets
    assert bool(ours.kept_sets) is keeps_sets
    assert ours.finished == theirs.finished
    assert [len(ours.tokens[f"r{number}"]) for number in range(5)] == LIMITS[:5]
    assert ours.preempted == theirs.preempted
    assert max(theirs.sizes) == 1
    assert len(ours.sizes) < len(theirs.sizes) / 6
    # Steps that hand nothing out send nothing.
    assert ours.messages < theirs.messages * 0.7
    assert len(ours.tokens["r5"]) == len(ours.tokens["r6"]) - 2 == 20
    assert len(ours.tokens["later0"]) == ours.scheduler.max_model_len - len(PROMPT) - 12
    if num_blocks == 100:
        computed_by_name = {
            name: computed for plan in ours.plans for name, _, computed in plan[0]
        }
        assert computed_by_name["later0"] == computed_by_name["later1"] == BLOCK
    elif not windowed:
        assert ours.preempted > 0


def counted_plans(engine: Engine) -> list[int]:
    """Grows by the number of requests of each plan that our planner makes."""
    planner = engine.scheduler._planner
    sizes = []
    if planner is not None:
        plan = planner.plan

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            if planned := plan(*args, **kwargs):
                sizes.append(planned.total_num_scheduled_tokens)
            return planned

        planner.plan = counted
    return sizes


@both
def test_a_step_with_a_request_that_takes_more_than_tokens_is_vllms(
    start, overlapping: bool
):
    engine = start(ours=True, overlapping=overlapping)
    own_plans = counted_plans(engine)
    add(engine, "steady", 60)
    for _ in range(10):
        engine.step()
    assert own_plans == [1] * 9
    add(engine, "streamed", 20, output_kind=RequestOutputKind.CUMULATIVE)
    while "streamed" not in engine.finished:
        engine.step()
    # The reply's prompt, and perhaps its last token, were beside plans of ours.
    assert len(own_plans) <= 11
    engine.drain()
    assert len(own_plans) > 30


@both
def test_prompts_are_vllms_to_place_where_requests_may_have_adapters(
    start, overlapping: bool
):
    engine = start(ours=True, overlapping=overlapping)
    own_plans = counted_plans(engine)
    # vLLM counts the adapters of all that run.
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for number in range(3):
        add(engine, f"r{number}", 40)
        before = len(own_plans)
        engine.step()
        assert len(own_plans) == before
        for _ in range(5):
            engine.step()
        assert len(own_plans) == before + 5


def test_every_step_is_vllms_with_another_scheduler_and_with_windows(start) -> None:
    full, windowed = (
        start(ours=True, overlapping=True, windowed=is_windowed)
        for is_windowed in (False, True)
    )
    assert not unsteady_cause(full.scheduler)
    assert not full.scheduler.disabled_features
    other_source = unsteady_cause(full.scheduler, "of another source")
    assert re.fullmatch(
        r"the scheduler of vLLM \S+ is not that of 0\.32\.0", other_source
    )
    cause = (
        "the engine has layers other than full attention, or blocks of several sizes"
    )
    assert windowed.scheduler.disabled_features == {STEADY: cause}


FEATURES = {
    "connector": "a connector of the KV cache",
    "ec_connector": "a connector of encoders",
    "aux_output_connector": "records of routed experts",
    "num_lookahead_tokens": "drafts",
    "num_spec_tokens": "drafts",
    "has_mamba_layers": "layers with a state",
    "is_mm_encoder_only": "an encoder alone",
    "use_pp": "pipeline stages",
    "needs_kv_cache_zeroing": "a KV cache that must be zeroed",
    "defer_block_free": "blocks that are freed later",
    "num_sampled_tokens_per_step": "several tokens a step",
    "decode_stagger": "staggered decoding",
    "dcp_world_size": "context parallelism",
    "pcp_world_size": "context parallelism",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_the_planner_lacks_is_named(start, feature: str) -> None:
    scheduler = start(ours=True, overlapping=True).scheduler
    setattr(scheduler, feature, 2)
    assert unsteady_cause(scheduler) == f"the engine has {FEATURES[feature]}"


def test_long_prompts_that_are_cut_for_others_are_vllms_to_plan(
    start, monkeypatch
) -> None:
    scheduler = start(ours=True, overlapping=True).scheduler
    monkeypatch.setattr(scheduler.scheduler_config, "long_prefill_token_threshold", 4)
    assert unsteady_cause(scheduler) == "the engine has long_prefill_token_threshold"


@both
@pytest.mark.parametrize("steps", [1, 3])
def test_a_pause_finds_the_same_blocks_in_the_cache(
    pair, overlapping: bool, steps: int
) -> None:
    ours, theirs = pair(overlapping=overlapping)
    for engine in (ours, theirs):
        add(engine, "r0", 60)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(40 // steps):
        for engine in (ours, theirs):
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
            for _ in range(steps):
                engine.step()
            engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            engine.drain()
        assert ours.state() == theirs.state()
    assert len(ours.tokens["r0"]) > 22
    # The older runner is told all tokens of a request that was not in the step before.
    after_nothing = [
        plan[1]
        for plan_before, plan in pairwise(ours.plans)
        if plan[2] and not plan_before[2]
    ]
    assert bool(after_nothing) is not (overlapping and steps == 1)
    assert all(list(cached.all_token_ids) == ["r0"] for cached in after_nothing)


@both
def test_a_reset_forgets_all_that_was_cached(start, overlapping: bool):
    engine = start(ours=True, overlapping=overlapping)
    add(engine, "r0", 40)
    engine.drain()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) > 0
    assert engine.scheduler.reset_prefix_cache(True, True)
    assert len(pool.cached_block_hash_to_block) == 0
    assert all(block.block_hash is None for block in pool.blocks)


@both
def test_vllm_is_asked_only_where_a_reply_or_a_block_begins_or_ends(
    start, overlapping: bool
):
    engine = start(ours=True, overlapping=overlapping)
    manager = engine.scheduler.kv_cache_manager
    requests = []
    takes = []
    vllms_slots = manager.allocate_slots
    vllms_update = engine.scheduler._update_request_with_output

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        requests.append(request.num_computed_tokens)
        return vllms_slots(request, *args, **kwargs)

    def update(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
        takes.append(request.num_output_tokens)
        return vllms_update(request, *args, **kwargs)

    manager.allocate_slots = allocate
    engine.scheduler._update_request_with_output = update
    assert isinstance(engine.scheduler, Scheduler)
    add(engine, "r0", 60)
    engine.drain()
    assert len(engine.tokens["r0"]) == 60
    # A prompt of 10 tokens; the last position that is computed is 68.
    # A block whose last token is planned is cached then, or when that token is known.
    assert requests == (
        [0, 16, 32, 48, 64] if overlapping else [0, 15, 16, 31, 32, 47, 48, 63, 64]
    )
    assert takes == [0, 59]


def gathering(engine: Engine, most_steps: int) -> Engine:
    """Returns `engine` whose prompts wait until there is one for every two replies."""
    engine.scheduler._gathering = PromptGathering(most_steps)
    engine.scheduler._gathering.replies_per_prompt = 2
    return engine


def begun(engine: Engine) -> dict[str, int]:
    """The step that took each request first."""
    steps: dict[str, int] = {}
    for step, (new, *_) in enumerate(engine.plans, 1):
        for name, *_ in new:
            steps.setdefault(name, step)
    return steps


def busy(engine: Engine, number: int) -> Engine:
    """Returns `engine` with `number` replies under way that last 60 steps."""
    for n in range(number):
        add(engine, f"busy{n}", 60)
    engine.step()
    engine.step()
    assert all(f"busy{n}" in begun(engine) for n in range(number))
    return engine


@both
def test_prompts_wait_for_each_other_and_for_so_many_steps_at_the_most(
    start, overlapping: bool
):
    engine = busy(gathering(start(ours=True, overlapping=overlapping), most_steps=5), 4)
    now = len(engine.plans)
    add(engine, "alone", 20)
    for _ in range(12):
        engine.step()
    # Five steps without it.
    assert begun(engine)["alone"] == now + 6
    assert all(len(plan[2]) == 4 for plan in engine.plans[now : now + 5])
    # An order for every two of the five replies.
    now = len(engine.plans)
    for name in ("first", "second", "third"):
        add(engine, name, 20)
        engine.step()
    assert [begun(engine)[name] for name in ("first", "second", "third")] == [
        now + 3
    ] * 3
    engine.drain()
    assert [len(engine.tokens[name]) for name in ("busy0", "alone", "third")] == [
        60,
        20,
        20,
    ]


@both
def test_no_prompt_waits_where_nothing_else_runs_or_weights_are_proved(
    start, overlapping: bool
):
    engine = gathering(start(ours=True, overlapping=overlapping), most_steps=50)
    add(engine, "first", 60)
    engine.step()
    assert begun(engine)["first"] == 1
    busy(engine, 4)
    now = len(engine.plans)
    add(engine, "waits", 20)
    engine.step()
    assert "waits" not in begun(engine)
    # A request that scores a sequence takes the others with it.
    add(engine, "probe", 1, prompt_logprobs=0)
    engine.step()
    assert begun(engine)["probe"] == begun(engine)["waits"] == now + 2


@both
def test_a_long_prompt_goes_on_in_every_step_and_takes_others_along(
    start, overlapping: bool
):
    engine = busy(gathering(start(ours=True, overlapping=overlapping), most_steps=5), 4)
    engine.scheduler.max_num_scheduled_tokens = 20
    now = len(engine.plans)
    add(engine, "long", 10, prompt=list(range(4, 74)))
    for _ in range(6):
        engine.step()
    add(engine, "short", 20)
    for _ in range(8):
        engine.step()
    assert begun(engine)["long"] == now + 6
    # 16 tokens a step beside the replies.
    steps = [dict(plan[2]).get("long") for plan in engine.plans[now + 5 : now + 11]]
    assert steps == [16, 16, 16, 16, 6, 1]
    assert begun(engine)["short"] == now + 10
    engine.drain()


@both
def test_what_a_step_has_no_room_for_follows_in_the_next(
    start, overlapping: bool
) -> None:
    engine = busy(gathering(start(ours=True, overlapping=overlapping), most_steps=5), 4)
    # A token of each reply, and one prompt of ten.
    engine.scheduler.max_num_scheduled_tokens = 14
    for n in range(4):
        add(engine, f"new{n}", 5)
    now = len(engine.plans)
    for _ in range(8):
        engine.step()
    # Nothing else is computed of a prompt that has begun.
    assert [begun(engine)[f"new{n}"] for n in range(4)] == [
        now + n + 1 for n in range(4)
    ]


@both
def test_members_of_a_group_that_waited_share_their_prompt(
    start, overlapping: bool
) -> None:
    engine = busy(
        gathering(start(ours=True, overlapping=overlapping), most_steps=50), 4
    )
    prompt = list(range(300, 340))
    for n in range(3):
        add(engine, f"member{n}", 5, prompt=prompt)
    engine.step()
    computed = {name: cached for name, _, cached in engine.plans[-1][0]}
    assert computed == {"member0": 0, "member1": 32, "member2": 32}


@both
@pytest.mark.parametrize("most_steps", [0, 3])
@pytest.mark.parametrize("num_blocks", [100, 10], ids=["roomy", "preempting"])
def test_replies_are_the_same_however_long_prompts_wait(
    pair, overlapping, num_blocks, most_steps
):
    for seed in range(SEEDS):
        waiting, theirs = pair(overlapping=overlapping, num_blocks=num_blocks)
        lengths = disturbed(gathering(waiting, most_steps), seed)
        # Which requests are cancelled depends on which have ended by then.
        both_left = lengths & disturbed(theirs, seed)
        assert lengths <= set(waiting.finished)
        assert len(both_left) > 5
        assert {name: waiting.tokens[name] for name in both_left} == {
            name: theirs.tokens[name] for name in both_left
        }
        assert not waiting.scheduler.requests


@both
def test_a_pause_hands_out_all_and_what_comes_later_is_apart(
    start, overlapping: bool
) -> None:
    engine = start(ours=True, overlapping=overlapping)
    for number in range(4):
        add(engine, f"r{number}", 60)
    for _ in range(12):
        engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.drain()
    sampled = dict(engine.sampled)
    assert all(count > 1 for count in sampled.values())
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == sampled
    # Nothing is left to say; new weights forget the cache and all are computed again.
    assert not engine.has_work()
    pool = engine.scheduler.kv_cache_manager.block_pool
    num_blocks = len(pool.blocks)
    # A single block of each request is cached, all four under one hash: their tokens are alike.
    assert sum(block.block_hash is not None for block in pool.blocks) == 4
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert len(pool.blocks) == num_blocks
    assert all(block.block_hash is None for block in pool.blocks)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    assert [len(engine.tokens[f"r{number}"]) for number in range(4)] == [60] * 4
    assert [len(engine.logprobs[f"r{number}"]) for number in range(4)] == [60] * 4
    assert engine.tokens["r0"] == engine.tokens["r1"] == [110 + n for n in range(60)]


def test_the_load_is_told_once_in_a_while_and_not_with_each_step(
    start, monkeypatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(chunking_scheduler.time, "monotonic", lambda: now_s[0])
    engine = start(ours=True, overlapping=False)
    for number in range(3):
        add(engine, f"r{number}", 80)
    engine.step()
    stats = [engine.scheduler.make_stats() for _ in range(2)]
    now_s[0] += chunking_scheduler.STATS_S
    stats += [engine.scheduler.make_stats() for _ in range(2)]
    # The first step has told the load already.
    assert [entry is None for entry in stats] == [True, True, False, True]
    assert stats[2].num_running_reqs == 3
    assert 0 < stats[2].kv_cache_usage <= 1


@both
def test_what_is_held_of_a_cancelled_request_is_dropped(
    start, overlapping: bool
) -> None:
    engine = start(ours=True, overlapping=overlapping)
    add(engine, "gone", 60)
    add(engine, "stays", 60)
    for _ in range(24):
        engine.step()
    engine.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED)
    before = len(engine.tokens["gone"])
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.drain()
    assert len(engine.tokens["stays"]) == engine.sampled["stays"]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    assert len(engine.tokens["gone"]) == before < engine.sampled["gone"]
    assert len(engine.tokens["stays"]) == 60
    # The name may come again.
    add(engine, "gone", 3)
    engine.tokens.clear()
    engine.drain()
    assert len(engine.tokens["gone"]) == 3


@both
def test_a_reader_of_parts_gets_chunks(start, overlapping: bool) -> None:
    engine = start(ours=True, overlapping=overlapping)
    add(engine, "streams", 40, output_kind=RequestOutputKind.DELTA)
    engine.drain()
    assert len(engine.sizes) <= 4
    assert sum(engine.sizes) == len(engine.logprobs["streams"]) == 40


@both
def test_requests_without_logprobs_get_none(start, overlapping: bool) -> None:
    engine = start(ours=True, overlapping=overlapping)
    add(engine, "plain", 40, logprobs=None)
    add(engine, "with", 40)
    engine.drain()
    assert len(engine.tokens["plain"]) == len(engine.tokens["with"]) == 40
    assert engine.logprobs["plain"] == []
    assert len(engine.logprobs["with"]) == 40


def test_a_token_without_its_logprob_is_an_error(start) -> None:
    engine = start(ours=True, overlapping=False)
    add(engine, "r0", 4)
    plan = engine.scheduler.schedule()
    output = engine._run(plan)
    output.logprobs = None
    with pytest.raises(RuntimeError, match="0 log-probabilities for"):
        for _ in range(4):
            engine.scheduler.update_from_output(plan, output)
            plan = engine.scheduler.schedule()
            output = engine._run(plan)
            output.logprobs = None


@pytest.mark.parametrize(
    ("num_blocks", "planned"), [(100, 100), (113, 113), (50_000, 113)]
)
def test_no_more_blocks_are_planned_with_than_requests_can_fill(
    start, num_blocks, planned
) -> None:
    # 8 requests of up to 97 tokens are 8 times 7 blocks of 16; twice that, and vLLM's null block.
    engine = start(ours=True, overlapping=False, num_blocks=num_blocks)
    assert engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks == planned
    for number in range(8):
        add(engine, f"r{number}", 80)
    engine.drain()
    assert engine.preempted == 0
    assert [len(engine.tokens[f"r{number}"]) for number in range(8)] == [80] * 8


def test_what_comes_beside_tokens_is_joined_too() -> None:
    chunk = Chunk(client_index=0, limit=16, with_logprobs=False)
    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, float(n)) for n in range(3)]
    stats = PrefillStats(num_prompt_tokens=7)
    for n in range(3):
        experts = np.full((2 if n == 0 else 1, 4), n, dtype=np.uint8)
        output = EngineCoreOutput(
            "r", [10 + n], routed_experts=experts, events=[events[n]]
        )
        output.prefill_stats = stats if n == 0 else None
        chunk.token_ids += output.new_token_ids
        chunk.keep(output)
    whole = chunk.pour(EngineCoreOutput("r", []))
    assert whole.new_token_ids == [10, 11, 12]
    assert whole.routed_experts[:, 0].tolist() == [0, 0, 1, 2]
    assert whole.events == events
    assert whole.prefill_stats is stats
    again = chunk.pour(EngineCoreOutput("r", []))
    assert (again.new_token_ids, again.routed_experts, again.events) == ([], None, None)


def test_kept_tokens_of_a_chunk_follow_each_other() -> None:
    chunk = Chunk(
        client_index=0,
        limit=16,
        with_logprobs=False,
    )
    masks = [
        SamplingMaskLists(np.array([4, 9])),
        SamplingMaskLists(
            token_ids=np.array([1, 2, 3]),
            offsets=np.array([0, 1, 3]),
        ),
    ]
    for mask in masks:
        chunk.keep(EngineCoreOutput("r", [], new_sampling_mask=mask))
    poured = chunk.pour(EngineCoreOutput("r", []))
    sets = poured.new_sampling_mask.to_nested_list()
    assert sets == [[4, 9], [1], [2, 3]]
    emptied = chunk.pour(EngineCoreOutput("r", []))
    assert emptied.new_sampling_mask is None


def disturbed(engine: Engine, seed: int) -> set[str]:
    """Requests that come, are cancelled, stand still and go on in any order; those that are left.

    In any step, also while another one is under way, as in vLLM's loop.
    """
    rng = random.Random(seed)
    scheduler = engine.scheduler
    names: set[str] = set()
    for number in range(150):
        kind = rng.random()
        if kind < 0.12 and len(scheduler.requests) < 8:
            prompt = [*PROMPT, *range(110, 110 + rng.choice([0, 5, 6, 7, 20]))]
            add(engine, f"r{number}", rng.randrange(1, 60), prompt=prompt)
            names.add(f"r{number}")
        elif kind < 0.16 and (open_ones := sorted(names - set(engine.finished))):
            gone = rng.choice(open_ones)
            scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
            names.discard(gone)
        elif kind < 0.2:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            if rng.random() < 0.5 and scheduler.requests:
                gone = rng.choice(sorted(scheduler.requests))
                engine.step()
                scheduler.finish_requests([gone], RequestStatus.FINISHED_ABORTED)
                names.discard(gone)
            engine.drain()
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.drain()
            scheduler.set_pause_state(PauseState.UNPAUSED)
        else:
            engine.step()
    engine.drain()
    return names


@both
@pytest.mark.parametrize("num_blocks", [100, 10], ids=["roomy", "preempting"])
@pytest.mark.parametrize(
    "newer_runner", [False, True], ids=["older-runner", "newer-runner"]
)
@pytest.mark.parametrize("keeps_sets", [False, True], ids=["all-tokens", "kept-tokens"])
def test_whatever_disturbs_it_every_plan_and_reply_is_that_of_vllms_scheduler(
    pair, overlapping: bool, num_blocks: int, newer_runner: bool, keeps_sets: bool
) -> None:
    kinds = {
        "num_blocks": num_blocks,
        "newer_runner": newer_runner,
        "keeps_sets": keeps_sets,
    }
    for seed in range(SEEDS):
        ours, theirs = pair(overlapping=overlapping, **kinds)
        own_plans = counted_plans(ours)
        lengths = disturbed(ours, seed)
        assert lengths == disturbed(theirs, seed)
        assert lengths <= set(ours.finished)
        assert {name: ours.tokens[name] for name in lengths} == {
            name: theirs.tokens[name] for name in lengths
        }
        assert {name: ours.kept_sets[name] for name in lengths} == {
            name: theirs.kept_sets[name] for name in lengths
        }
        assert any(ours.kept_sets.values()) is keeps_sets
        assert not ours.scheduler.requests
        # At the end of a pause our scheduler has one more, empty step: it hands out what is held.
        our_plans, their_plans = (
            [p for p in loop.plans if p[2]] for loop in (ours, theirs)
        )
        assert len(our_plans) == len(their_plans)
        for ours_of_step, other in zip(our_plans, their_plans, strict=True):
            assert ours_of_step[:3] == other[:3]
        assert len(own_plans) > 20


@both
@pytest.mark.parametrize("num_blocks", [100, 10], ids=["roomy", "preempting"])
@pytest.mark.parametrize(
    "newer_runner", [False, True], ids=["older-runner", "newer-runner"]
)
def test_prompts_beside_replies_are_planned_as_by_vllms_scheduler(
    pair, overlapping: bool, num_blocks: int, newer_runner: bool
) -> None:
    kinds = {"num_blocks": num_blocks, "newer_runner": newer_runner}
    preempted = 0
    # With the last seed a prompt loses its place while nothing waits.
    for seed in (*range(SEEDS), 20):
        ours, theirs = pair(overlapping=overlapping, **kinds)
        own_plans = counted_plans(ours)
        rows = []
        for engine in (ours, theirs):
            rng = random.Random(seed)
            scheduler = engine.scheduler
            # With eight replies there is room for a part of most prompts.
            scheduler.max_num_scheduled_tokens = 24 if num_blocks == 100 else 10
            scheduler.kv_cache_manager.watermark_blocks = 2 * (seed % 2)
            for number in range(50):
                prompt = [
                    *PROMPT,
                    *(rng.randrange(9, 99) for _ in range(rng.randrange(60))),
                ]
                add(engine, f"r{number}", rng.randrange(1, 40), prompt=prompt)
                for _ in range(rng.randrange(4)):
                    engine.step()
                    if engine is ours and (batch := scheduler._planner.batch):
                        rows.append(len(batch.members))
                assert len(scheduler.running) <= scheduler.max_num_running_reqs == 8
            engine.drain()
        assert len(ours.plans) == len(theirs.plans)
        for our_plan, other in zip(ours.plans, theirs.plans, strict=True):
            assert our_plan == other
        assert (ours.tokens, ours.finished) == (theirs.tokens, theirs.finished)
        preempted += ours.preempted
        # Most plans are ours, with prompts too; rows of ended replies go.
        assert max(rows) <= 24
        if num_blocks == 100:
            assert len(own_plans) > 0.5 * len(ours.plans)
            assert max(rows) > 16
    assert (preempted > 0) is (num_blocks == 10)
