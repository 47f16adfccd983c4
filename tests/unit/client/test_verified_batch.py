"""What follows from the batch of a step without a model."""

from collections import Counter

from slipstream.client.verified_batch import GroupNumbers, StepNumbers
from slipstream.core.group_sizes import GroupSizes


def test_metrics_of_an_environment_with_a_slash_in_its_name_are_its_own() -> None:
    ones = [1.0, 1.0]
    columns = ("reward", "prompt_tokens", "episode_tokens", "turns", "branches")
    group = GroupNumbers("math/easy", 0, rewards=[0.0, 1.0])
    numbers = StepNumbers(
        groups={"g": group},
        columns={
            name: ones
            for name in (*columns, "generation_s", "environment_s", "truncated")
        },
        replies=[3, 3],
        metrics={("math/easy", "right"): [0.5], ("math/easy", "ignored/seed"): [3.0]},
        num_episodes=Counter({"math/easy": 2}),
    )
    row = numbers.row(GroupSizes(2))
    assert row["math/easy/right"] == 0.5
    assert row["math/easy/ignored/seed"] == 1.5
    assert row["math/easy/equal_rewards_fraction"] == 0.0
