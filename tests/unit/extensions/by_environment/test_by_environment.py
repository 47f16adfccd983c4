"""What differs between environments: their weight in the loss, their estimator, and refusals."""

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from slipstream.client.launch.scene import Scene
from slipstream.core.configuration.replayed_settings import places_and_training
from slipstream.core.environment_rules import (
    algorithm_of,
    environment_rules,
    objectives_of,
    sampling_temperatures,
)
from slipstream.core.errors import ConfigError
from slipstream.core.group_sizes import GroupSizes, group_sizes_of
from slipstream.core.settings.config import Config
from slipstream.core.types import ReferenceLogprobs
from slipstream.extensions.by_environment.launch import check_names, check_staleness
from slipstream.learner.algorithms.columns import OF_ALL_STEPS
from slipstream.learner.algorithms.losses import step_columns
from slipstream.learner.trainer.algorithms.loss import (
    ModelEstimates,
    TokenLoss,
    policy_loss,
    training_sequences,
    weighted,
)
from slipstream.learner.trainer.algorithms.loss_inputs import batch_numbers
from slipstream.learner.trainer.batches.batch import Batch
from support.fakes.fake_controller import make_batch
from support.fakes.packed import packed
from support.fakes.small_configs import small_config

# The rewards of the four groups.
REWARDS = "0 1 2  5 5 8  1 0 0  3 1 4"
OWN = "support.fakes.own_grpo:advantage"
OWN_LOSS = "support.fakes.own_grpo:loss"


# Settings of a table, by name.
Values: TypeAlias = dict[str, Any]


def config_of(algorithm: Values | None = None, **entries: Values) -> Config:
    """Settings of groups of three, with an entry for each environment."""
    extensions: Values = {}
    if entries:
        extensions["by_environment"] = {"environments": entries}
    sampling = {
        "max_reply_tokens": 10,
        "max_episode_tokens": 64,
    }
    plain = {"group_size": 3}
    return small_config(
        algorithm=plain | (algorithm or {}),
        sampling=sampling,
        extensions=extensions,
    )


def mixed_batch() -> Batch:
    """Four groups, by turns of environments a and b."""
    batch = make_batch(
        0,
        num_groups=4,
        group_size=3,
        vocab_size=9,
        max_tokens=20,
    )
    group_ids = list(dict.fromkeys(batch.group_ids))
    rewards = map(float, REWARDS.split())
    trajectories = []
    for trajectory in batch.trajectories:
        group = group_ids.index(trajectory.group_id)
        changed = dataclasses.replace(
            trajectory,
            reward=next(rewards),
            environment="ab"[group % 2],
        )
        trajectories.append(changed)
    return Batch(0, batch.batch_id, tuple(trajectories))


def only(batch: Batch, environment: str) -> Batch:
    members = [t for t in batch.trajectories if t.environment == environment]
    return Batch(batch.step, batch.batch_id, tuple(members))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed"])
def test_a_weight_multiplies_the_loss_of_its_environment_and_divides_no_others(
    aggregation: str,
) -> None:
    batch = mixed_batch()
    config = config_of({"aggregation": aggregation}, b={"loss_weight": 2.5})
    sequences = training_sequences(batch, config)
    mini_batches = [range(12)]
    changed = weighted(sequences, batch, mini_batches, config)
    num_trained = [int(sequence.loss_mask.sum()) for sequence in sequences]
    total = sum(num_trained)
    # The loss of a mini-batch whose tokens have the losses 1, 2, ...: by formulas in docs.
    losses = np.arange(1.0, total + 1)
    ours = 0.0
    expected = 0.0
    end = 0
    for place, trajectory in enumerate(batch.trajectories):
        start = end
        end += num_trained[place]
        sum_of_losses = float(losses[start:end].sum())
        ours += changed[place].loss_weight * sum_of_losses / total
        divisors = {
            "token_mean": total,
            "sequence_mean": 12 * num_trained[place],
            "fixed": 12 * 10,
        }
        weight = 2.5 if trajectory.environment == "b" else 1.0
        expected += weight * sum_of_losses / divisors[aggregation]
    assert ours == pytest.approx(expected, rel=1e-12)


def test_environments_without_a_weight_are_trained_as_without_the_table() -> None:
    batch = mixed_batch()
    plain = config_of()
    config = config_of(b={"loss_weight": 2.5})
    members = [range(12)]
    before = weighted(training_sequences(batch, plain), batch, members, plain)
    after = weighted(training_sequences(batch, config), batch, members, config)
    for place, trajectory in enumerate(batch.trajectories):
        factor = 2.5 if trajectory.environment == "b" else 1.0
        assert after[place].loss_weight == factor * before[place].loss_weight
        assert np.array_equal(after[place].advantages, before[place].advantages)


@pytest.mark.parametrize("own", ["rloo", "reinforce_pp", "score"])
def test_an_estimator_of_its_own_takes_the_episodes_of_its_environment_alone(
    own: str,
) -> None:
    batch = mixed_batch()
    run = {"advantage": "reinforce_pp_baseline"}
    run_alone = config_of(run)
    own_alone = config_of({"advantage": own})
    sequences = training_sequences(batch, config_of(run, b={"advantage": own}))
    by_environment = {
        "a": training_sequences(only(batch, "a"), run_alone),
        "b": training_sequences(only(batch, "b"), own_alone),
    }
    for trajectory, sequence in zip(batch.trajectories, sequences, strict=True):
        expected = by_environment[trajectory.environment].pop(0)
        assert np.array_equal(sequence.advantages, expected.advantages)


@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_a_divergence_in_the_reward_costs_an_environment_by_its_own_factor(
    coefficient: float,
) -> None:
    batch = mixed_batch()
    estimates = []
    for place, trajectory in enumerate(batch.trajectories):
        logprobs = trajectory.behavior_logprobs - np.float32(0.1 * place)
        no_ids = np.zeros((len(logprobs), 0), dtype=np.uint32)
        no_logprobs = no_ids.astype(np.float32)
        reference = ReferenceLogprobs(logprobs, no_ids, no_logprobs)
        estimates.append(ModelEstimates(reference))
    algorithm = {
        "advantage": "score",
        "kl": {
            "coefficient": 0.2,
            "placement": "reward",
            "estimator": "k1",
        },
    }
    config = config_of(algorithm, b={"kl_coefficient": coefficient})
    sequences = training_sequences(batch, config, estimates)
    for place, trajectory in enumerate(batch.trajectories):
        factor = coefficient if trajectory.environment == "b" else 0.2
        score = trajectory.reward - factor * 0.1 * place * trajectory.num_sampled_tokens
        sequence = sequences[place]
        assert sequence.kl_coefficients is None
        assert sequence.advantages[sequence.loss_mask] == pytest.approx(
            score, rel=1e-5, abs=1e-6
        )


@pytest.mark.parametrize("run_loss", ["ppo", "deploy.algorithms.top_entropy:loss"])
@pytest.mark.parametrize(
    "entry",
    [
        {"loss_args": {"clip_low": 0.02, "clip_high": 0.05}},
        {"loss": "gspo", "loss_args": {"clip_low": 0.01}},
        {"loss": "cispo", "loss_args": {"clip_high": 0.1}},
        {"loss": "reinforce"},
    ],
)
def test_the_loss_of_a_mixed_batch_is_the_sum_of_its_environments_losses(
    entry: Values, run_loss: str
) -> None:
    """In float64, each environment as a batch of its own under its own algorithm."""
    if "loss" not in entry and run_loss != "ppo":
        entry = {**entry, "loss": "ppo"}
    batch = mixed_batch()
    batch_of_a = only(batch, "a")
    batch_of_b = only(batch, "b")
    algorithm = {"loss": run_loss, "advantage": "score"}
    own_algorithm = {"advantage": "score", "loss": "ppo", **entry}
    mixed_loss, mixed_gradient = trained(batch, config_of(algorithm, b=entry))
    loss_of_a, gradient_of_a = trained(batch_of_a, config_of(algorithm))
    loss_of_b, gradient_of_b = trained(batch_of_b, config_of(own_algorithm))
    sum_of_losses = loss_of_a.loss + loss_of_b.loss
    expected_loss = pytest.approx(sum_of_losses.item(), rel=1e-12)
    assert mixed_loss.loss.item() == expected_loss
    gradients = {"a": gradient_of_a, "b": gradient_of_b}
    for place, trajectory in enumerate(batch.trajectories):
        own_gradient = gradients[trajectory.environment].pop(0)
        expected = pytest.approx(own_gradient, rel=1e-12, abs=1e-15)
        assert mixed_gradient[place] == expected
    _, plain_gradient = trained(batch, config_of(algorithm))
    assert plain_gradient != mixed_gradient


def trained(batch: Batch, config: Config) -> tuple[TokenLoss, list[list[float]]]:
    """The loss of a batch, and the gradient by the policy's values of each trajectory."""
    sequences = training_sequences(batch, config)
    micro_batch = packed(sequences, range(len(sequences)))
    micro_batch = micro_batch.map_fields(
        lambda tensor, _: tensor.double() if tensor.is_floating_point() else tensor
    )
    # Each sequence by itself is the same in both kinds of batches.
    lengths = [len(sequence) for sequence in sequences]
    places = torch.cat(list(map(torch.arange, lengths)))
    moves = places.double()
    old = micro_batch.behavior_logprobs + 0.1 * moves.sin()
    policy = old + 0.2 * (1.7 * moves).cos()
    policy.requires_grad_()
    entropy = 1.0 + (2.3 * moves).sin()
    objectives = [*objectives_of(config).values()]
    columns = step_columns(*objectives, has_reference=False)
    numbers = batch_numbers(
        [(policy.detach(), entropy)],
        [old],
        [micro_batch],
        objectives,
        step=0,
        cp_group=None,
        group=None,
    )
    loss = policy_loss(
        policy,
        entropy,
        old,
        micro_batch,
        objectives,
        columns,
        group=None,
        numbers=numbers,
    )
    loss.loss.backward()
    assert policy.grad is not None
    return loss, [part.tolist() for part in policy.grad.split(lengths)]


def test_the_reports_of_a_loss_are_of_its_own_tokens_alone() -> None:
    batch = mixed_batch()
    run = {"advantage": "score", "loss_args": {"clip_low": 1e-6, "clip_high": 1e-6}}
    mixed, _ = trained(batch, config_of(run, b={"loss": "reinforce"}))
    alone, _ = trained(only(batch, "a"), config_of(run))
    columns = step_columns(config_of(run).algorithm, has_reference=False)
    names = [column.name for column in columns]
    place = len(OF_ALL_STEPS) + names.index("clip_fraction")
    num_clipped, number, _ = mixed.statistics[:, place].tolist()
    expected_clipped, expected_number, _ = alone.statistics[:, place].tolist()
    assert (num_clipped, number) == (expected_clipped, expected_number)
    assert num_clipped > 0


def test_arguments_alone_are_those_of_the_runs_loss() -> None:
    run = {"loss": "cispo", "loss_args": {"clip_high": 0.5}}
    own_arguments = {"loss_args": {"clip_low": 0.1}}
    own_loss = {"loss": "reinforce"}
    config = config_of(run, b=own_arguments, c=own_loss)
    objectives = objectives_of(config)
    names = list(objectives)
    assert names == ["", "b", "c"]
    assert objectives[""] is config.algorithm
    assert objectives["b"].loss == "cispo"
    assert objectives["b"].loss_args["clip_low"] == 0.1
    assert objectives["b"].loss_args["clip_high"] == 0.2
    assert objectives["c"].loss_args == {}
    # An estimator of its own changes no loss, and a loss no estimator.
    assert environment_rules(config)["b"].algorithm is None
    own_estimator = config_of(b={"advantage": "score"})
    assert len(objectives_of(own_estimator)) == 1


def test_groups_have_the_size_of_their_environment() -> None:
    sizes = group_sizes_of(config_of(b={"group_size": 5}, c={"loss_weight": 2.0}))
    assert [sizes.of(name) for name in "abc"] == [3, 5, 3]
    assert (sizes.smallest, sizes.largest) == (3, 5)
    assert group_sizes_of(config_of()) == GroupSizes(3)


def test_demonstrations_may_be_groups_of_one_beside_groups_that_are_compared() -> None:
    config = config_of(b={"group_size": 1, "advantage": "score"})
    own_algorithm = algorithm_of(config, "b")
    assert own_algorithm.group_size == 1
    assert config.algorithm.estimator is not None
    assert config.algorithm.estimator.compares_group


def test_a_group_that_has_no_room_is_refused_by_its_setting() -> None:
    entries = {"b": {"group_size": 9}}
    extensions = {"by_environment": {"environments": entries}}
    setting = f"{PLACE}.group_size"
    with pytest.raises(ConfigError, match=f"{setting} must be at most .*, got 9 and 8"):
        small_config(
            extensions=extensions,
            rollout_server={"max_episodes": 8},
        )
    with pytest.raises(ConfigError, match="queue.max_bytes must hold a batch"):
        small_config(
            extensions=extensions,
            rollout_server={"max_episodes": 16},
            queue={"max_bytes": 20000},
        )


def test_a_loss_that_leaves_the_lag_uncorrected_is_told() -> None:
    behavior = {"loss": "ppo", "loss_args": {"ratio": "behavior"}, "weight": "none"}
    finding = check_staleness(Scene(config_of(behavior, b={"loss": "reinforce"})))
    assert finding is not None
    assert (
        "environments.b: algorithm.max_staleness is 2 without a correction"
        in finding.seen
    )
    without_loss = config_of(behavior, b={"loss_weight": 2.0})
    assert check_staleness(Scene(without_loss)) is None
    corrected = config_of({}, b={"loss": "reinforce"})
    assert check_staleness(Scene(corrected)) is None


def test_arguments_alone_are_those_of_the_runs_estimator() -> None:
    run = {
        "advantage": "return_to_go",
        "advantage_args": {"gamma": 0.5},
    }
    own_arguments = {"advantage_args": {"gamma": 0.9}}
    own_estimator = {"advantage": "grpo"}
    config = config_of(run, b=own_arguments, c=own_estimator)
    assert algorithm_of(config, "a") is config.algorithm
    assert algorithm_of(config, "b").advantage == "return_to_go"
    assert algorithm_of(config, "b").advantage_args["gamma"] == 0.9
    assert algorithm_of(config, "c").advantage_args == {}
    assert environment_rules(config)["c"].loss_weight == 1.0
    assert environment_rules(config_of()) == {}


PLACE = r"extensions\.by_environment\.environments\.b"


@pytest.mark.parametrize(
    ("algorithm", "entry", "cause"),
    [
        (
            {},
            {},
            f"{PLACE} must name what differs for the environment, got an empty table",
        ),
        ({}, {"loss_weight": 0.0}, f"{PLACE}.loss_weight: .* greater than 0, got 0.0"),
        (
            {},
            {"loss_weight": float("inf")},
            f"{PLACE}.loss_weight: .* finite number, got inf",
        ),
        ({}, {"temperature": 0.0}, f"{PLACE}.temperature: .* got 0.0"),
        ({}, {"temperature": 2.5}, f"{PLACE}.temperature: .* got 2.5"),
        (
            {"agreement": "bits"},
            {"temperature": 0.9},
            f"{PLACE}.temperature must be 1 with alg",
        ),
        (
            {},
            {"kl_coefficient": 0.1},
            f"{PLACE}.kl_coefficient needs algorithm.kl.coefficient > 0",
        ),
        (
            {"kl": {"coefficient": 0.1}},
            {"kl_coefficient": -1.0},
            f"{PLACE}.kl_coefficient: .* -1.0",
        ),
        (
            {"advantage": "none", "kl": {"coefficient": 0.1}},
            {"kl_coefficient": 0.0},
            f"{PLACE}: advantage = 'none' trains no reward",
        ),
        (
            {},
            {"weight": 2.0},
            f"{PLACE}.weight: Extra inputs are not permitted, got 2.0",
        ),
        ({}, {"advantage": "grop"}, f"{PLACE}: .*, got 'grop'"),
        (
            {},
            {"advantage": OWN},
            f"{PLACE}.advantage must be a built-in estimator, got '{OWN}'",
        ),
        (
            {"advantage": OWN},
            {"advantage_args": {"x": 1}},
            f"must be a built-in .* got '{OWN}'",
        ),
        ({}, {"advantage": "gae"}, f"{PLACE}.advantage = 'gae' needs a critic"),
        (
            {"group_size": 1, "advantage": "score"},
            {"advantage": "grpo"},
            "group_size must be >= 2",
        ),
        (
            {"filter": "unequal_rewards"},
            {"advantage": "score"},
            "filter must be 'none'",
        ),
        ({}, {"advantage_args": {"gamma": 1.0}}, f"{PLACE}: .*gamma"),
        ({}, {"group_size": 1}, f"{PLACE}: .* group_size must be >= 2, got 1"),
        ({}, {"group_size": 0}, f"{PLACE}.group_size: .* greater than .*, got 0"),
        ({}, {"loss": "pop"}, f"{PLACE}: .*, got 'pop'"),
        (
            {},
            {"loss_args": {"clip_low": 2.0}},
            f"{PLACE}: clip_low of loss ppo: .* got 2.0",
        ),
        (
            {},
            {"loss": "reinforce", "loss_args": {"ratio": "behavior"}},
            f"{PLACE}: .*'ratio'",
        ),
        (
            {},
            {"loss_args": {"ratio": "behavior"}},
            f"{PLACE}: .* weight must be 'none'",
        ),
        (
            {},
            {"loss": OWN_LOSS},
            f"{PLACE}.loss must be a built-in loss, got '{OWN_LOSS}'",
        ),
        (
            {"loss": OWN_LOSS},
            {"loss_args": {"x": 1}},
            f"must be a built-in loss, got '{OWN_LOSS}'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_that_names_it(
    algorithm: Values, entry: Values, cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        config_of(algorithm, b=entry)
    assert len(str(error.value).splitlines()) <= 2


def test_a_temperature_that_others_do_not_know_is_refused() -> None:
    entries = {"b": {"temperature": 0.9}}
    extensions = {"by_environment": {"environments": entries}}
    server = {"base_url": "http://127.0.0.1:9/v1", "model": "teacher"}
    with pytest.raises(
        ConfigError, match="temperature must be 1 with reference.server"
    ):
        small_config(
            algorithm={"kl": {"coefficient": 0.1}},
            reference={"server": server},
            extensions=extensions,
        )
    with pytest.raises(
        ConfigError, match="must be sampling.temperature = 1 with drafts, whose"
    ):
        small_config(drafts={"tokens": 2}, extensions=extensions)


def test_temperatures_are_those_of_the_run_but_for_entries_with_one() -> None:
    config = config_of(b={"temperature": 0.5}, c={"loss_weight": 2.0})
    assert sampling_temperatures(config, ["a", "b", "c", "b"]) == [1.0, 0.5, 1.0, 0.5]
    without_temperature = config_of(c={"loss_weight": 2.0})
    assert sampling_temperatures(without_temperature, ["a"]) is None


@pytest.mark.parametrize(
    ("tables", "cause"),
    [
        ({"evaluations": [{"name": "b", "reference": "m:E"}]}, "got an evaluation"),
        ({"controller": {"client_loop": True}}, "needs controller.client_loop = False"),
        ({"critic": {"learning_rate": 1e-3}}, "excludes the table critic"),
    ],
)
def test_other_tables_that_exclude_it_are_named(tables: Values, cause: str) -> None:
    entries = {"b": {"advantage": "turn_gae"}}
    with pytest.raises(ConfigError, match=cause):
        small_config(
            algorithm={"advantage": "turn_gae"},
            extensions={"by_environment": {"environments": entries}},
            **tables,
        )


def test_a_replay_may_change_how_recorded_batches_are_trained_and_nothing_else() -> (
    None
):
    start = "extensions.by_environment.environments.b"
    allowed = [
        f"{start}.loss_weight=2.0",
        f"{start}.advantage_args.gamma=0.5",
        f"{start}.loss_args.clip_high=0.5",
    ]
    assert places_and_training(allowed) == ([], allowed)
    other_names = [
        f"{start}.temperature",
        f"{start}.group_size",
        start,
        "extensions.task_weights.environments.b.function",
    ]
    for name in other_names:
        with pytest.raises(ConfigError, match="cannot be another in a replay"):
            places_and_training([f"{name}=1"])


def test_a_name_that_no_environment_has_is_told() -> None:
    entries = {"b": {"loss_weight": 2.0}}
    config = small_config(
        environments=[{"name": "a", "reference": "m:E"}],
        extensions={"by_environment": {"environments": entries}},
    )
    finding = check_names(Scene(config))
    assert finding is not None
    assert "environments.b holds for none" in finding.seen
