"""The rule by which learner and engines of one GPU compute in turn."""

from __future__ import annotations

import pytest
from slipstream.learner.controller.publishing.turns import TurnRule


def run_steps(rule: TurnRule, seconds_together: float, seconds_in_turn: float) -> list[str]:
    """Twenty steps of 100 tokens, each as long as the way in which it is made takes."""
    now_s, said = 0.0, []
    for _ in range(20):
        now_s += seconds_in_turn if rule.in_turns else seconds_together
        said.append(rule.stepped(now_s, tokens=100))
    return said


@pytest.mark.parametrize(
    ("setting", "in_turns"), [("off", False), ("pause", True), ("sleep", True)]
)
def test_a_setting_other_than_auto_never_changes(setting: str, in_turns: bool) -> None:
    rule = TurnRule(setting, window=2)
    said = run_steps(rule, 1.0, 2.0)
    assert rule.in_turns == in_turns
    assert not any(said)


@pytest.mark.parametrize(
    ("together", "in_turn", "chosen"),
    [(2.0, 1.0, True), (1.0, 2.0, False), (1.0, 1.0, False)],
)
def test_auto_keeps_the_way_that_trained_more_tokens_per_second(
    together: float, in_turn: float, chosen: bool
) -> None:
    rule = TurnRule("auto", window=2)
    said = run_steps(rule, together, in_turn)
    assert rule.in_turns is chosen
    # Two windows at the same time and two in turn, of two steps each.
    assert [step for step, text in enumerate(said, 1) if text] == [8]
    assert f"{100 / together:,.0f} trained tokens/s at the same time" in said[7]
    assert f"{100 / in_turn:,.0f} in turn" in said[7]


def test_the_first_window_of_each_way_does_not_count() -> None:
    rule = TurnRule("auto", window=1)
    ways = []
    # The first step holds the start, and the third one what the first way left behind.
    for at_s in (1000.0, 1002.0, 9000.0, 9001.0):
        ways.append(rule.in_turns)
        text = rule.stepped(at_s, tokens=100)
    assert ways == [False, False, True, True]
    assert "50 trained tokens/s at the same time, 100 in turn" in text
    assert rule.in_turns
