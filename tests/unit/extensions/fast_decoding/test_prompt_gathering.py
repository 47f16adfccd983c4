"""How long prompts wait for others."""

from itertools import product

import pytest
from slipstream.extensions.fast_decoding.server.prompt_gathering import (
    REPLIES_PER_PROMPT,
    PromptGathering,
)

PLACES = 3 * REPLIES_PER_PROMPT


def waits(num_ready: int, num_replies: int) -> bool:
    return PromptGathering(4).holds(num_ready=num_ready, num_replies=num_replies)


def test_prompts_wait_until_there_is_one_for_each_32_replies() -> None:
    assert REPLIES_PER_PROMPT == 32
    assert [number for number in range(20) if waits(number, 512)] == list(range(1, 16))
    assert waits(1, 33)


@pytest.mark.parametrize("num_replies", range(33))
def test_nothing_waits_beside_few_replies(num_replies: int) -> None:
    assert not any(waits(number, num_replies) for number in range(9))


@pytest.mark.parametrize("most_steps", range(5))
def test_nothing_waits_for_more_steps_than_it_may(most_steps: int) -> None:
    gathering = PromptGathering(most_steps)
    waits = [
        gathering.holds(num_ready=1, num_replies=512) for _ in range(most_steps + 1)
    ]
    assert waits == [True] * most_steps + [False]


@pytest.mark.parametrize("most_steps", range(4))
def test_no_prompt_is_held_longer_whenever_the_others_come(most_steps: int) -> None:
    """All arrivals of up to two prompts in each of six steps, and replies that end meanwhile."""
    longest = 0
    for arrivals, leaving in product(product(range(3), repeat=6), (0, 20)):
        gathering = PromptGathering(most_steps)
        waits = []
        replies = PLACES
        for arriving in (*arrivals, *[0] * most_steps):
            waits += [0] * arriving
            ready = len(waits)
            if gathering.holds(num_ready=ready, num_replies=replies):
                assert 0 < ready < replies / REPLIES_PER_PROMPT
                waits = [steps + 1 for steps in waits]
                longest = max(longest, *waits)
            else:
                replies += ready
                waits = []
            replies = max(0, replies - leaving)
        assert not waits
    assert longest == most_steps
