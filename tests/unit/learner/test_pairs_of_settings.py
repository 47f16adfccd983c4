"""Settings that are right alone are right together: pairs that validation takes, trained.

Each field of every section is drawn by its type. Three steps of a tiny policy then keep what every
step must keep.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from slipstream.core.errors import ConfigError
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.settings.config import Config
from slipstream.learner.controller.reporting.invariants import broken_invariants
from support.fakes.small_configs import config_with
from support.rigs.drawn_settings import (
    OWN,
    Changes,
    Setting,
    environment_settings,
    every_setting,
)
from support.rigs.fuzz_budget import times
from support.rigs.table_training import Step, are_equal, steps

BASE: Changes = {
    "model.dtype": "float32",
    "algorithm.group_size": 4,
    "algorithm.groups_per_step": 4,
    "sampling.max_reply_tokens": 6,
    "sampling.max_episode_tokens": 32,
}
NUM_STEPS = 3
DRAWS = 4
# More episodes a step take long, and settings with as many are no others.
MOST_EPISODES = 128
SETTINGS = tuple(every_setting())
# Sections of what a step samples and trains; others decide where and how fast.
OF_STEPS = tuple(
    s for s in SETTINGS if s.section in ("algorithm", "sampling", "reference")
)

OF_ENVIRONMENT = tuple(environment_settings())
# Settings of where and how fast, which must change nothing of what is trained.
OF_PLACES = tuple(setting for setting in SETTINGS if setting not in OF_STEPS)
# A curriculum of an environment's tasks.
TASK_WEIGHTS: Changes = {
    f"extensions.task_weights.environments.{OWN}.function": "own:weights",
}


def accepted(
    pair: Sequence[Setting], chance: random.Random, beside: Changes
) -> tuple[Changes, Config] | None:
    """Values of both settings that validation takes together, or None after a few draws."""
    for _ in range(DRAWS):
        changes: Changes = dict(beside)
        for setting in pair:
            changes |= setting.draw(chance)
        try:
            return changes, config_with(BASE | changes)
        except ConfigError:
            continue
    return None


def faults(config: Config, seed: int) -> Iterator[str]:
    """Whatever the first steps of a run do not keep."""
    # A run says so at its start.
    are_penalties_told = any(
        "lengths alone" in warning for warning in config.training_warnings
    )
    for step in steps(config, number=NUM_STEPS, seed=seed):
        for invariant in broken_invariants(
            config, step.row, step.groups, step.advantages
        ):
            if not (invariant.name == "advantage" and are_penalties_told):
                yield invariant.text
        yield from _plain_faults(config, step)


def _plain_faults(config: Config, step: Step) -> Iterator[str]:
    """The same, said once more without the product."""
    for name, value in step.row.items():
        if not math.isfinite(value):
            yield f"{name} is {value}"
    if config.algorithm.filter == "unequal_rewards":
        for group in step.groups:
            rewards = [member.reward for member in group]
            if are_equal(rewards):
                yield f"group {group[0].group_id} of equal rewards {rewards} was trained"


def checked(pairs: Sequence[Sequence[Setting]], beside: Changes | None = None) -> int:
    """Trains each of the pairs that validation takes `beside` others; returns their number."""
    chance = random.Random(1)
    num_trained = 0
    for number, pair in enumerate(pairs):
        settings = accepted(pair, chance, beside or {})
        if settings is None:
            continue
        changes, config = settings
        largest_group = group_sizes_of(config).largest
        episodes = largest_group * config.algorithm.groups_per_step
        # The policy of the rig tells no likely tokens of a reference, and has no critic.
        if (
            episodes > MOST_EPISODES
            or config.algorithm.kl.uses_top_k
            or config.critic is not None
        ):
            continue
        num_trained += 1
        texts = list(faults(config, seed=number))
        assert not texts, f"{changes}: {texts[0]}"
    return num_trained


def test_every_setting_is_drawn_but_names_places_and_tables() -> None:
    """A setting of another type would be left out here, without a word."""
    chance = random.Random(2)
    drawn = [setting for setting in SETTINGS if setting.draw(chance)]
    kinds = {str(s.field.annotation) for s in SETTINGS if s not in drawn}
    numbers = [
        kind for kind in kinds if "float" in kind or "int" in kind or "bool" in kind
    ]
    assert numbers == []
    names = {setting.name for setting in drawn}
    assert names > {
        "sampling.top_p",
        "algorithm.filter",
        "algorithm.kl.placement",
        "lora.rank",
    }
    assert len(names) > 100


def test_all_pairs_of_choices_keep_what_every_step_must_keep() -> None:
    choices = [setting for setting in OF_STEPS if setting.is_choice]
    pairs = [*itertools.combinations(choices, 2)]
    assert checked(pairs) > len(pairs) / 4


def test_pairs_of_settings_keep_what_every_step_must_keep() -> None:
    chance = random.Random(3)
    pairs = [
        (chance.choice(OF_STEPS), chance.choice(SETTINGS)) for _ in range(times(90))
    ]
    assert checked(pairs) > times(90) / 4


@pytest.mark.long
def test_many_pairs_of_the_settings_of_a_step_keep_what_it_must_keep() -> None:
    every_pair = [*itertools.combinations(OF_STEPS, 2)]
    pairs = random.Random(4).sample(every_pair, min(times(300), len(every_pair)))
    assert checked(pairs) > len(pairs) / 4


def test_what_one_environment_has_of_its_own_goes_with_each_setting_of_a_step() -> None:
    chance = random.Random(5)
    names = {
        setting.name.rpartition(".")[2]
        for setting in OF_ENVIRONMENT
        if setting.draw(chance)
    }
    assert names == {
        "advantage",
        "group_size",
        "kl_coefficient",
        "loss",
        "loss_weight",
        "temperature",
    }
    pairs = [*itertools.combinations(OF_ENVIRONMENT, 2)]
    pairs += [
        (chance.choice(OF_ENVIRONMENT), chance.choice(OF_STEPS))
        for _ in range(times(60))
    ]
    assert checked(pairs) > len(pairs) / 4


def test_settings_of_places_go_with_what_one_environment_has_of_its_own() -> None:
    names = {setting.name for setting in OF_PLACES}
    assert names > {
        "agents.recover",
        "queue.max_bytes",
        "rollout_server.pipeline_parallel_size",
    }
    chance = random.Random(6)
    pairs = [
        (chance.choice(OF_ENVIRONMENT), chance.choice(OF_PLACES))
        for _ in range(times(60))
    ]
    assert checked(pairs) > len(pairs) / 4


def test_a_curriculum_goes_with_pairs_of_the_settings_of_a_step() -> None:
    chance = random.Random(7)
    pairs = [
        (chance.choice(OF_STEPS), chance.choice((*OF_STEPS, *OF_ENVIRONMENT)))
        for _ in range(times(40))
    ]
    assert checked(pairs, TASK_WEIGHTS) > len(pairs) / 4


@pytest.mark.parametrize("size", [2, 4])
def test_stages_and_agents_that_go_on_change_nothing_of_a_step(size: int) -> None:
    chance = random.Random(8)
    beside: Changes = {
        "rollout_server.pipeline_parallel_size": size,
        "agents.recover": True,
        "algorithm.weight": "split",
        "algorithm.max_staleness": 2,
    }
    pairs = [
        (chance.choice(OF_STEPS), chance.choice(OF_ENVIRONMENT))
        for _ in range(times(30))
    ]
    assert checked(pairs, beside) > len(pairs) / 8
