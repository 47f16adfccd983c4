"""Names that an error suggests in the place of a name that does not exist."""

import pytest
from slipstream.core.configuration.near_names import did_you_mean, near_names

KNOWN = ("group_size", "groups_per_step", "loss", "max_staleness", "tp", "pp", "vpp", "etp", "ep")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        # 12 of 16 and 12 of 21 characters are common.
        ("groups", ["group_size", "groups_per_step"]),
        # 0.9 and 0.64, which is more than twice as far.
        ("group_sise", ["group_size"]),
        ("max_stalenes", ["max_staleness"]),
        ("zzzzzz", []),
    ],
)
def test_all_that_are_about_as_near_as_the_best_are_named(name: str, near: list[str]) -> None:
    assert near_names(name, KNOWN) == near


def test_no_more_than_three_are_named() -> None:
    assert near_names("tpp", KNOWN)[:2] == ["tp", "pp"]
    assert len(near_names("tpp", KNOWN)) == 3


def test_nothing_below_the_cutoff_is_named() -> None:
    assert near_names("groups", KNOWN, cutoff=0.7) == ["group_size"]
    assert near_names("groups", KNOWN, cutoff=0.8) == []


@pytest.mark.parametrize(
    ("near", "question"),
    [
        (["a"], "did you mean 'a'?"),
        (["a", "b"], "did you mean 'a' or 'b'?"),
        (["a", "b", "c"], "did you mean 'a', 'b' or 'c'?"),
    ],
)
def test_the_question_names_each(near: list[str], question: str) -> None:
    assert did_you_mean(near) == question
