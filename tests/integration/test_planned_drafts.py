"""The scheduler that plans ahead while workers draft, with a model that is a table of numbers."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from slipstream.core.extension import installed
from slipstream.extensions.drafts.switch import MeasuredDraftSwitch
from slipstream.rollout_server.vllm.engine_arguments import engine_config
from slipstream.rollout_server.vllm.engine_scheduler import scheduler_class
from support.fakes.small_configs import NGRAM, small_config
from support.fakes.tiny_models import SMALLEST, make_model_folder
from support.rigs.scheduler_loop import BLOCK, LIMITS, PROMPT, Engine, add, scheduler_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

DRAFT_TOKENS = NGRAM["num_speculative_tokens"]
PLACES = 8


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401 - vLLM's
    config = small_config(
        model={
            "path": str(
                make_model_folder(tmp_path_factory.mktemp("model"), **SMALLEST)
            ),
            "dtype": "float32",
        },
        sampling={"max_reply_tokens": 64, "max_episode_tokens": 96},
        rollout_server={
            "max_episodes": PLACES,
            "enforce_eager": True,
            "engine": {"block_size": BLOCK, "speculative_config": NGRAM},
        },
    )
    engine = engine_config(config, seed=0)
    # vLLM plans ahead on GPUs, and with other methods.
    engine.scheduler_config.async_scheduling = True
    return engine


@dataclass
class Drafting(Engine):
    """Workers accept as many drafted tokens as chance says; token n of a text is 100 + n."""

    drafted: list[int] = field(default_factory=list)
    _chance: random.Random = field(default_factory=lambda: random.Random(4))

    def _run(self, plan: Any) -> Any:  # noqa: ANN401 - vLLM's
        # Only the workers know how many tokens of each request are computed.
        for new in plan.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        names = list(plan.num_scheduled_tokens)
        sampled = []
        ids = []
        starts = [0]
        for name in names:
            drafts = plan.scheduled_spec_decode_tokens.get(name, [])
            assert drafts == [-1] * len(drafts)
            end = self._computed[name] + plan.num_scheduled_tokens[name] - len(drafts)
            self.drafted.append(len(drafts))
            is_reply = end >= len(PROMPT)
            num_accepted = self._chance.randint(0, len(drafts)) if is_reply else 0
            sampled.append(
                [100 + end + n for n in range(num_accepted + 1)] if is_reply else []
            )
            self._computed[name] = end + num_accepted
            # vLLM returns a row for each token that it verified.
            ids += [100 + end + n for n in range(len(drafts) + 1)]
            starts.append(len(ids))
        rows = np.asarray(ids, dtype=np.int32)[:, None]
        logprobs = LogprobsLists(
            rows,
            (-1 / rows).astype(np.float32),
            np.ones(len(rows), dtype=np.int32),
            starts if len(rows) > len(names) else None,
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=logprobs if names else None,
        )


def started(settings: Any, num_blocks: int) -> Drafting:  # noqa: ANN401 - vLLM's
    """Two steps are under way; every request is there."""
    scheduler = scheduler_of(
        scheduler_class(installed(), async_scheduling=True), settings, num_blocks
    )
    scheduler.use_v2_model_runner = True
    engine = Drafting(scheduler, 2)
    for number, limit in enumerate(LIMITS):
        add(engine, f"r{number}", limit)
    return engine


def check_replies(engine: Drafting) -> None:
    """All tokens and log-probabilities arrived, once and in order."""
    for number, limit in enumerate(LIMITS):
        tokens = [100 + len(PROMPT) + place for place in range(limit)]
        assert engine.tokens[f"r{number}"] == tokens
        expected = np.asarray([-1 / token for token in tokens], dtype=np.float32)
        assert np.array_equal(
            np.asarray(engine.logprobs[f"r{number}"], np.float32), expected
        )
    assert len(engine.finished) == len(LIMITS)


@pytest.mark.parametrize("num_blocks", [100, 12], ids=["roomy", "preempting"])
def test_replies_are_whole_however_many_tokens_are_accepted(
    settings, num_blocks: int
) -> None:
    engine = started(settings, num_blocks)
    engine.drain()
    check_replies(engine)
    assert set(engine.drafted) == {0, DRAFT_TOKENS}
    assert (engine.preempted > 0) is (num_blocks == 12)
    # Once a second there are statistics of the load alone.
    spec_decoding_stats = [
        stats.spec_decoding_stats for stats in engine.stats if stats.spec_decoding_stats
    ]
    drafted = sum(stats.num_draft_tokens for stats in spec_decoding_stats)
    accepted = sum(stats.num_accepted_tokens for stats in spec_decoding_stats)
    assert 0 < accepted < drafted <= sum(engine.drafted)


def test_replies_are_whole_where_running_ones_are_computed_again(settings) -> None:
    engine = started(settings, 100)
    for _ in range(4):
        for _ in range(3):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    check_replies(engine)


@dataclass
class Noted(MeasuredDraftSwitch):
    """A switch that keeps what it is told: the requests of a step, or None for a pause."""

    told: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(DRAFT_TOKENS, PLACES)

    def end_step(self, num_requests: int, *_: object, **__: object) -> None:
        self.told.append(num_requests)

    def pause(self) -> None:
        self.told.append(None)


@pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])
def test_time_without_requests_and_in_pauses_is_not_that_of_a_step(
    settings, overlapping
) -> None:
    engine = started(settings, 100)
    if not overlapping:
        scheduler = scheduler_of(
            scheduler_class(installed(), async_scheduling=False), settings, 100
        )
        engine = Engine(scheduler, 1)
        for number, limit in enumerate(LIMITS):
            add(engine, f"r{number}", limit)
    switch = engine.scheduler._switch = Noted()
    for _ in range(12):
        engine.step()
    assert switch.told[-1] == len(engine.scheduler.running)
    assert None not in switch.told
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert switch.told[-1] is None
    engine.step()
    assert switch.told[-1] is not None
    engine.drain()
    assert switch.told[-1] is None
