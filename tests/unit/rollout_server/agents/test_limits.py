"""What a call may use of its episode's limits, or the error that its client gets."""

import dataclasses

import pytest
from slipstream.rollout_server.agents.request_rules import WAIT, Refusal, Use, room
from slipstream.rollout_server.engine_interface import Sampling

SAMPLING = Sampling(1.0, 1.0, 0, 10, 4, 50, max_total_tokens=80, max_branches=2)


NOTHING = Use()


def ask(use: Use = NOTHING, *, prompt: int = 20, context: int = 20, is_new: bool = True, **others):
    sampling = dataclasses.replace(SAMPLING, **others)
    return room(sampling, use, prompt=prompt, context=context, is_new=is_new)


def test_a_reply_has_the_room_that_its_branch_and_all_branches_leave() -> None:
    assert ask() == 10
    assert ask(prompt=45, context=5, is_new=False) == 5
    assert ask(Use(tokens=55)) == 5
    # A branch that goes on is no new one.
    assert isinstance(ask(Use(branches=2), is_new=False), int)


@pytest.mark.parametrize(
    ("use", "others", "code", "named"),
    [
        (Use(), {"prompt": 50}, "context_length_exceeded", "sampling.max_episode_tokens = 50"),
        (Use(tokens=60), {}, "context_length_exceeded", "sampling.max_total_tokens = 80"),
        (
            Use(tokens=40),
            {"max_total_tokens": 0},
            "context_length_exceeded",
            "sampling.max_episode_tokens = 50",
        ),
        (Use(turns=4), {}, "max_turns_exceeded", "sampling.max_turns = 4"),
        (Use(branches=2), {}, "max_branches_exceeded", "sampling.max_branches = 2"),
    ],
)
def test_a_call_beyond_a_limit_is_refused_with_its_name(use, others, code, named) -> None:
    refusal = ask(use, **others)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (400, code)
    assert named in refusal.message


def test_a_call_waits_for_others_that_may_leave_room() -> None:
    assert ask(Use(tokens=10, reserved_tokens=45)) is WAIT
    assert ask(Use(tokens=10, reserved_tokens=40)) == 10
    assert ask(Use(tokens=65, reserved_tokens=15)) is not WAIT
