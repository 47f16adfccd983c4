"""Random messages into every method of a controller in the middle of a run.

Whatever comes, the answer is a status that callers know, in one line, and the run goes on to its
end. A case that once broke that stays here as an example. `tests/fuzz.py` says a million of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fuzz_calls import FATAL, METHODS, Answers, Case, answered, random_case
from hypothesis import given
from hypothesis import strategies as st
from live_run import LiveRun

CALLS = tuple(name for name in METHODS if name not in FATAL)


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[LiveRun]:
    """A run that all these calls share; it must come to its own end behind them."""
    with LiveRun(tmp_path_factory.mktemp("live")) as run:
        yield run
    assert run.code == 0
    summary = run.summary()
    assert (summary["steps"], summary["ledger"]["difference"]) == (6, 0)
    assert run.complaints.lines == []


def cases(names: tuple[str, ...]) -> st.SearchStrategy[Case]:
    seeds = st.integers(0, 2**32)
    return seeds.map(lambda seed: random_case(random.Random(seed), names))


@given(case=cases(CALLS))
def test_any_message_gets_a_known_answer(live: LiveRun, case: Case):
    answers = Answers()
    answers.note(case, *live.do(lambda channel: answered(channel, case)), also=())
    assert answers.broken == []
