"""What the advisor measures, when it predicts, and how it checks itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import threading
from collections.abc import Callable

import pytest
from slipstream.core.advice import Advice, advise, profile_from_json, profile_to_json
from slipstream.core.step_simulation import Profile, Setting
from slipstream.core.types import GroupId, Purpose
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.records.ledger import made_for_one
from slipstream.learner.controller.reporting import advisor as module
from slipstream.learner.controller.reporting.advisor import Advisor, engine_costs
from slipstream.learner.controller.reporting.step_times import ServerWork
from slipstream.v1 import status_pb2
from support.fakes.fake_trajectories import GOOD
from support.rigs.waiting import LIMIT_S, until

SETTING = Setting(servers=1, replicas=1, max_staleness=1, group_size=2)
# A step of 2 s: 0.5 of waiting, 1 of training, 0.2 to publish, and 0.3 on the way.
ROW = {
    "step_s": 2.0,
    "groups_wait_s": 0.5,
    "training_s": 1.0,
    "forward_s": 0.0,
    "forward_backward_s": 0.75,
    "publish_s": 0.2,
    "pause_s": 0.1,
    "num_tokens": 12.0,
}


def work(steps: float, tokens: float, *, step_s: float, token_s: float) -> ServerWork:
    return ServerWork(step_s * steps + token_s * tokens, 0.0, 60.0, steps, tokens)


def group() -> Group:
    """Two episodes that came back 1 s after their lease, 0.25 of it beside the engine."""
    made = Group(GroupId("g"), "e", 0, 0, Purpose.TRAINING, 2, 0, None, leased_s=10.0)
    for member in range(2):
        made.finished[member] = dataclasses.replace(GOOD, member=member, generation_s=0.75)
        made.back_s[member] = 11.0
    return made


class Rig:
    """An advisor that is told of steps, and a loop that predicts."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.warnings: list[str] = []
        self.advisor = Advisor(self.written.append, self.warnings.append)

    def steps(self, number, *, setting=SETTING, in_turns=False, **changes):
        self.advisor.note_report(work(30, 60, step_s=0.2, token_s=0.0))
        for _ in range(number):
            self.advisor.note_step(
                ROW | changes,
                [group(), group()],
                setting=setting,
                places=8,
                waste=1.0,
                in_turns=in_turns,
            )

    async def advice(self) -> None:
        """Predicts until a new prediction is written."""
        before = len(self.written)
        async with asyncio.timeout(LIMIT_S):
            loop = asyncio.create_task(self.advisor.advise_forever())
            while len(self.written) == before:
                await asyncio.sleep(0.01)
            loop.cancel()


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)


def test_an_engines_costs_are_told_apart_where_its_replies_vary() -> None:
    drawn = random.Random(1)
    reports = [work(n, n * drawn.uniform(1, 64), step_s=2e-3, token_s=3e-4) for n in range(1, 99)]
    assert engine_costs(reports) == pytest.approx((2e-3, 3e-4))


def test_an_engine_that_always_runs_as_many_replies_costs_them_together() -> None:
    reports = [work(n, 16 * n, step_s=2e-3, token_s=1e-4) for n in range(1, 99)]
    assert engine_costs(reports) == pytest.approx((2e-3 + 16e-4, 0.0))


def test_no_part_of_an_engines_costs_is_below_nothing() -> None:
    # More replies that take less time, and a time of replies alone.
    falling = [ServerWork(s, 0.0, 9.0, 10, t) for s, t in ((2.0, 10), (1.0, 100))]
    assert engine_costs(falling) == pytest.approx((0.15, 0.0))
    rising = [ServerWork(s, 0.0, 9.0, 10, t) for s, t in ((0.1, 10), (9.0, 100))]
    step_s, token_s = engine_costs(rising) or (math.nan, math.nan)
    assert (step_s, token_s) == pytest.approx((0.0, 9.1 / 110))
    assert engine_costs([ServerWork(1.0, 0.0, 1.0, 0, 0)]) is None
    # Probes alone, as with demonstrations: steps without a token that counts.
    assert engine_costs([ServerWork(1.0, 0.0, 1.0, 1, 0)] * 2) is None


async def test_a_profile_is_what_steps_and_reports_say() -> None:
    rig = Rig()
    assert rig.advisor.profile() is None
    rig.steps(11)
    found = rig.advisor.profile()
    assert found is not None
    assert (found.training_fixed_s, found.training_token_s) == pytest.approx((0.25, 0.75 / 12))
    assert (found.publish_s, found.order_s, found.pause_s) == pytest.approx((0.2, 0.3, 0.1))
    assert found.engine_step_s == pytest.approx(0.2)
    assert found.groups[0][0] == (2, 3, pytest.approx(0.25))
    assert (found.setting, found.groups_per_step, found.places) == (SETTING, 2, 8)


async def test_engines_in_turns_rest_as_long_as_their_reports_say() -> None:
    rig = Rig()
    # 42 s in 60 s are 1.4 s of each step of 2: training, publish, and 0.2 of the 0.3 s on the way.
    rig.advisor.note_report(ServerWork(18.0, 42.0, 0.0, 30, 60))
    rig.steps(11, in_turns=True)
    found = rig.advisor.profile()
    assert found is not None and found.in_turns
    assert found.resting_order_s == pytest.approx(0.2)
    assert profile_from_json(json.loads(json.dumps(profile_to_json(found)))) == found


async def test_a_prediction_is_compared_with_the_steps_that_follow_it() -> None:
    rig = Rig()
    # The first step has the loading in it.
    rig.steps(1, step_s=500.0)
    rig.steps(10)
    assert rig.advisor.gauges() == {}
    await rig.advice()
    gauges = rig.advisor.gauges()
    assert "prediction_error" not in gauges
    rig.steps(10, step_s=4.0)
    await rig.advice()
    error = rig.advisor.gauges()["prediction_error"]
    assert error == pytest.approx(gauges["predicted_steps_per_s"] * 4.0 - 1)
    assert rig.advisor.summary()["prediction_error"] == error
    table = json.loads(rig.written[-1])
    assert profile_from_json(table["profile"]) == rig.advisor.profile()


async def test_a_change_that_was_foreseen_is_compared_with_what_came_of_it() -> None:
    rig = Rig()
    rig.steps(11)
    await rig.advice()
    assert rig.advisor.advice is not None
    more = dataclasses.replace(SETTING, servers=2)
    predicted = rig.advisor.advice.predictions()[more]
    # The step in which the server came is of neither setting.
    rig.steps(1, setting=more, step_s=99.0)
    rig.steps(10, setting=more, step_s=1.5)
    await rig.advice()
    assert rig.advisor.error == pytest.approx(predicted * 1.5 - 1)


async def test_a_setting_that_was_not_foreseen_keeps_the_last_error() -> None:
    rig = Rig()
    rig.steps(11)
    await rig.advice()
    rig.steps(11, setting=dataclasses.replace(SETTING, servers=7))
    await rig.advice()
    assert math.isnan(rig.advisor.error)


async def test_figures_that_cannot_be_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def fail(profile: Profile, is_cancelled: Callable[[], bool]) -> Advice:
        raise ZeroDivisionError(f"{profile.places} places")

    with monkeypatch.context() as patched:
        patched.setattr(module, "advise", fail)
        loop = asyncio.create_task(rig.advisor.advise_forever())
        for _ in range(2):
            rig.steps(11)
            await until(lambda: rig.warnings)
    rig.steps(11)
    await until(lambda: rig.written)
    loop.cancel()
    assert rig.warnings == ["there is no advice: ZeroDivisionError: 8 places"]


async def test_an_end_of_the_run_ends_a_prediction_under_way(monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def last(profile: Profile, is_cancelled: Callable[[], bool]) -> Advice:
        def is_asked() -> bool:
            begun.set()
            return is_cancelled()

        try:
            # It would take minutes.
            long = dataclasses.replace(profile.setting, max_staleness=100_000)
            return advise(dataclasses.replace(profile, setting=long), is_asked)
        finally:
            ended.set()

    monkeypatch.setattr(module, "advise", last)
    rig = Rig()
    rig.steps(11)
    loop = asyncio.create_task(rig.advisor.advise_forever())
    await until(begun.is_set)
    assert not ended.is_set()
    loop.cancel()
    await until(ended.is_set)
    assert not rig.written


@pytest.mark.parametrize("busy_s", [0.0, -5.0, 1e9])
async def test_an_engine_that_tells_times_that_cannot_be_gets_advice(busy_s: float) -> None:
    rig = Rig()
    rig.steps(11)
    rig.advisor._work.clear()
    rig.advisor.note_report(ServerWork(busy_s, 0.0, 60.0, 100, 100))
    await rig.advice()
    assert all(math.isfinite(value) for value in rig.advisor.gauges().values())


def test_tokens_that_are_never_trained_count_as_waste() -> None:
    ledger = status_pb2.Ledger(generated=120, judged=20, filtered=30, failed=10, evaluated=10)
    assert made_for_one(ledger) == 2.0
    assert made_for_one(status_pb2.Ledger()) == 1.0
    assert made_for_one(status_pb2.Ledger(generated=5, failed=5)) == 1.0
