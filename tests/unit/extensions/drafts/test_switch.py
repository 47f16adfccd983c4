from collections.abc import Callable

import pytest
from slipstream.extensions.drafts.switch import (
    FIRST_KEPT,
    TRIAL_STEPS,
    MeasuredDraftSwitch,
)

TOKENS = 3
MOST = 64


class Engine:
    """Steps of an engine whose duration and tokens a function of drafting says."""

    def __init__(
        self, switch: MeasuredDraftSwitch, step: Callable[[bool], tuple[int, float]]
    ) -> None:
        self._switch = switch
        self.step = step
        self._now_s = 0.0

    def run(self, num_steps: int, num_requests: int = 8) -> list[bool]:
        """Runs some steps; returns for each whether it drafted."""
        drafted = []
        for _ in range(num_steps):
            drafts = self._switch.lookup[num_requests] > 0
            tokens, seconds = self.step(drafts)
            self._now_s += seconds
            self._switch.end_step(
                num_requests, tokens, drafts=drafts, now_s=self._now_s
            )
            drafted.append(drafts)
        return drafted


def slow(drafts: bool) -> tuple[int, float]:
    """Twice the time for a tenth more tokens."""
    return (88, 0.02) if drafts else (80, 0.01)


def fast(drafts: bool) -> tuple[int, float]:
    return (160, 0.015) if drafts else (80, 0.01)


def test_drafts_that_cost_more_than_they_bring_are_switched_off_and_tried_again() -> (
    None
):
    engine = Engine(MeasuredDraftSwitch(TOKENS, MOST), slow)
    trials = engine.run(2 * TRIAL_STEPS + 2)
    assert trials[:TRIAL_STEPS] == [True] * TRIAL_STEPS
    assert not any(trials[TRIAL_STEPS + 2 :])
    later = engine.run(20 * FIRST_KEPT)
    assert 0 < sum(later) < 0.1 * len(later)
    engine.step = fast
    engine.run(20 * FIRST_KEPT)
    now = engine.run(10 * FIRST_KEPT)
    assert sum(now) > 0.9 * len(now)


def test_drafts_that_pay_stay_on() -> None:
    drafted = Engine(MeasuredDraftSwitch(TOKENS, MOST), fast).run(10 * FIRST_KEPT)
    assert sum(drafted) > 0.9 * len(drafted)


def test_each_power_of_two_of_requests_is_judged_apart() -> None:
    switch = MeasuredDraftSwitch(TOKENS, MOST)
    engine = Engine(switch, slow)
    engine.run(3 * TRIAL_STEPS, num_requests=40)
    assert switch.lookup[33:65] == [0] * 32
    assert switch.lookup[1:33] == [TOKENS] * 32


def test_time_between_steps_that_do_not_follow_each_other_does_not_count() -> None:
    switch = MeasuredDraftSwitch(TOKENS, MOST)
    engine = Engine(switch, fast)
    engine.run(TRIAL_STEPS // 2)
    switch.pause()
    # A minute without requests, in the trial with drafts.
    engine._now_s += 60.0
    drafted = engine.run(4 * FIRST_KEPT)
    assert sum(drafted) > 0.8 * len(drafted)


# How much longer than others some steps of a trial take: a stall, or prompts that come together.
STALLS = {"stall": {20: 60.0}, "prompts": dict.fromkeys(range(20, 30), 5.0)}


@pytest.mark.parametrize("stalls", STALLS.values(), ids=STALLS)
@pytest.mark.parametrize(
    ("faster", "stalled"), [(fast, True), (slow, False)], ids=["on", "off"]
)
def test_steps_that_stall_do_not_turn_the_decision(
    faster: Callable[[bool], tuple[int, float]], stalled: bool, stalls: dict[int, float]
) -> None:
    """The way that is faster has the stalls, in its only trial."""
    num_steps = {False: 0, True: 0}

    def step(drafts: bool) -> tuple[int, float]:
        num_steps[drafts] += 1
        tokens, seconds = faster(drafts)
        return tokens, seconds * (
            stalls.get(num_steps[drafts], 1.0) if drafts is stalled else 1.0
        )

    engine = Engine(MeasuredDraftSwitch(TOKENS, MOST), step)
    engine.run(2 * TRIAL_STEPS + 4)
    assert engine.run(FIRST_KEPT // 2) == [stalled] * (FIRST_KEPT // 2)


def test_a_way_that_stalls_again_and_again_loses() -> None:
    num_steps = 0

    def step(drafts: bool) -> tuple[int, float]:
        nonlocal num_steps
        num_steps += 1
        return (88, 0.1 if num_steps % 3 == 0 else 0.01) if drafts else (80, 0.01)

    engine = Engine(MeasuredDraftSwitch(TOKENS, MOST), step)
    engine.run(2 * TRIAL_STEPS + 4)
    assert not any(engine.run(FIRST_KEPT // 2))
