"""How much is drafted, and when nothing is."""

import pytest
from slipstream.rollout_server.inference.draft_table import DraftRule

TRIAL, KEPT, REPLIES = 20, 50, 8


class Machine:
    """An engine whose steps take as long, and bring as much, as they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rule = DraftRule(4, trial_steps=TRIAL, kept_steps=KEPT, clock=lambda: self.now_s)
        self.length = 4

    def run(self, steps: int, with_drafts: tuple[int, float], without: tuple[int, float]) -> list:
        """The lengths of the steps' drafts; tokens and seconds of a step with and without."""
        found = []
        for _ in range(steps):
            tokens, seconds = with_drafts if self.length else without
            self.now_s += seconds
            self.length = self.rule.next_length(num_replies=REPLIES, sampled=tokens)
            found.append(self.length)
        return found


@pytest.mark.parametrize(
    ("replies", "length"), [(1, 8), (56, 8), (64, 7), (128, 3), (256, 1), (257, 0), (2000, 0)]
)
def test_many_replies_get_shorter_drafts_and_then_none(replies: int, length: int) -> None:
    assert DraftRule(8).next_length(num_replies=replies, sampled=0) == length


def test_drafts_that_bring_more_than_they_cost_are_kept() -> None:
    found = Machine().run(2 * TRIAL + KEPT, (20, 0.015), (8, 0.010))
    assert found == [4] * (TRIAL - 1) + [0] * TRIAL + [4] * (KEPT + 1)


def test_drafts_that_cost_more_than_they_bring_rest_until_the_next_trial() -> None:
    found = Machine().run(3 * TRIAL + KEPT, (10, 0.015), (8, 0.010))
    assert found == [4] * (TRIAL - 1) + [0] * (TRIAL + KEPT) + [4] * TRIAL + [0]


def test_the_next_trial_may_find_otherwise() -> None:
    machine = Machine()
    machine.run(2 * TRIAL + KEPT, (10, 0.015), (8, 0.010))
    machine.run(2 * TRIAL, (30, 0.015), (8, 0.010))
    assert machine.run(KEPT - 1, (30, 0.015), (8, 0.010)) == [4] * (KEPT - 1)


def test_a_pause_in_a_trial_decides_nothing() -> None:
    machine = Machine()
    machine.run(TRIAL // 2, (20, 0.015), (8, 0.010))
    machine.now_s += 3600
    found = machine.run(2 * TRIAL - TRIAL // 2 + 5, (20, 0.015), (8, 0.010))
    assert found[-5:] == [4] * 5
