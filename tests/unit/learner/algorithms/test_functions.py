"""Functions of an algorithm by name: the built-in ones, and modules of one's own."""

import dataclasses
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS
from slipstream.core.types import Branch, Status, Trajectory
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.columns import Reduce
from slipstream.learner.algorithms.episodes import RewardedEpisode, ScoredEpisode
from slipstream.learner.algorithms.filters import unequal_rewards
from slipstream.learner.algorithms.functions import (
    filtered,
    function_of,
    is_counted,
    is_trained,
    load_functions,
    rewarded,
    shaped_rewards,
    used_functions,
)
from slipstream.learner.algorithms.losses import step_columns
from slipstream.learner.algorithms.rewards import overlong
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.trainer.recorded_run import check_functions
from support.fakes import wrong_algorithms
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.packed import algorithm, loss_inputs, terms_of, weights_of
from support.fakes.small_configs import small_config

OWN = """
import math
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from slipstream.learner.algorithms.episodes import ShapedReward, TokenAdvantages
from slipstream.learner.algorithms.inputs import TokenTerms, TokenWeights

def steep(tokens, *, factor: Annotated[float, Field(gt=0)], side: Literal["low", "high"] = "low"):
    losses = -factor * tokens.logprobs * tokens.advantages
    return TokenTerms(losses, {"steep_fraction": losses > 0, "steep_max": losses.detach()})

def raises(inputs):
    return 1 / 0

def short(inputs):
    return inputs.logprobs[1:] if hasattr(inputs, "logprobs") else [1.0]

def double(tokens):
    return tokens.logprobs.double()

def text(inputs):
    return "three"

def detached(tokens):
    return tokens.logprobs.detach()

def itself(tokens):
    return tokens.logprobs

def changes(tokens):
    tokens.advantages.mul_(2)
    return tokens.logprobs * tokens.advantages

def named(tokens):
    return TokenTerms(tokens.logprobs, {"Not A Name": tokens.logprobs})

def taken(tokens):
    return TokenTerms(tokens.logprobs, {"entropy": tokens.logprobs})

def wide(tokens):
    return TokenTerms(tokens.logprobs, {"wide": tokens.logprobs.sum()})

def infinite(inputs):
    return [math.inf for _ in inputs]

def costly(episodes):
    episodes[0].token_costs[0] = 5.0
    return [0.0 for _ in episodes]

def counted(episodes, *, most: int = 3):
    return np.array([min(most, float(len(e.lags))) for e in episodes])

def loose(tokens, factor: float = 1.0):
    return tokens.logprobs

def bare(tokens, *, factor=1.0):
    return tokens.logprobs

def nothing():
    return None

def shaped(group):
    return [ShapedReward(e.reward / 2, {"half": e.reward / 2}) for e in group]

def half_reported(episodes):
    return [TokenAdvantages(np.ones(len(e.lags)), reports={"ones": 1.0}) for e in episodes]

def missing(group):
    return [ShapedReward(e.reward, {"half": math.nan}) for e in group]

def taken_name(group):
    return [ShapedReward(e.reward, {"loss": 1.0}) for e in group]

half = 0.5
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with the functions above, in the folder of the test."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("def loss(tokens):\n    return (\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in FUNCTIONS.items() for name in names],
)
def test_built_in_functions_have_the_arguments_of_their_settings(kind, name):
    settings = {"cache_tokens": 1} if name == "overlong" else {}
    needs = {"kl": {"coefficient": 1.0}} if name == "none" else {}
    function = function_of(
        algorithm(**{kind: name, f"{kind}_args": settings}, **needs), kind
    )
    _, *keywords = inspect.signature(function.call.func).parameters.values()  # type: ignore[attr-defined]
    assert all(keyword.kind is keyword.KEYWORD_ONLY for keyword in keywords)
    fields = FUNCTIONS[kind][name].arguments.model_fields
    defaults = {
        name: inspect.Parameter.empty if field.is_required() else field.default
        for name, field in fields.items()
    }
    assert {keyword.name: keyword.default for keyword in keywords} == defaults


def test_ones_own_loss_is_called_with_its_arguments_and_reports_by_name(
    module: str,
) -> None:
    settings = {"loss": f"{module}:steep", "loss_args": {"factor": 3}}
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    terms = terms_of(algorithm(**settings), loss_inputs(policy, policy.detach()))
    assert terms.losses.tolist() == [6.0, 3.0]
    assert terms.reports["steep_fraction"].tolist() == [True, True]
    columns = step_columns(algorithm(**settings), has_reference=False)
    terms = {column.name: column.reduce for column in columns}
    assert terms["steep_fraction"] is Reduce.MEAN
    assert terms["steep_max"] is Reduce.LARGEST
    assert terms[f"loss {module}:steep"] is Reduce.FAULTS


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("steep", {}, "algorithm.loss_args: loss {} needs the argument 'factor'"),
        (
            "steep",
            {"factor": 0},
            "factor of loss {}: input should be greater than 0, got 0",
        ),
        (
            "steep",
            {"factor": 1, "side": "up"},
            "side of loss {}: input should be 'low' or 'high'",
        ),
        ("steep", {"factr": 1}, "loss {} has no argument 'factr'; known: factor, side"),
        (
            "loose",
            {},
            "loss {} takes its inputs, and arguments behind a star: not factor: float",
        ),
        ("nothing", {}, "loss {} takes no inputs: they are its first parameter"),
        ("bare", {}, "the argument 'factor' of loss {} needs an annotation"),
        ("absent", {}, "algorithm.loss {}: MODULE has no function absent"),
        ("half", {}, "algorithm.loss {}: MODULE has float, no function, half"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(module, function, given, message):
    name = f"{module}:{function}"
    with pytest.raises(ConfigError) as caught:
        function_of(algorithm(loss=name, loss_args=given), "loss")
    assert message.format(name).replace("MODULE", module) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_that_cannot_be_imported_is_refused_in_one_line(module, tmp_path):
    for name, cause in (
        (
            "nowhere_to_be_found:loss",
            "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        (
            f"{module}_broken:loss",
            f"SyntaxError: '(' was never closed ({module}_broken.py:2)",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            function_of(algorithm(loss=name), "loss")
        assert str(caught.value).endswith(
            f"in {tmp_path} or Python's path failed: {cause}"
        )


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", "ZeroDivisionError: division by zero (own_"),
        ("short", "the result is [1], not [2]"),
        ("double", "the result is torch.float64, not torch.float32"),
        ("text", "the result is neither a tensor nor TokenTerms: 'three'"),
        ("detached", "the losses have no gradient"),
        ("changes", "it changed its input advantages in place"),
        ("named", "the report Not A Name needs a name of a-z, 0-9, _ and /"),
        ("taken", "the report entropy has the name of another metric"),
        ("wide", "the report wide is [], not [2]"),
    ],
)
def test_a_faulty_loss_is_named_in_one_line(
    module: str, function: str, what: str
) -> None:
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    with pytest.raises(RunFailed) as caught:
        terms_of(
            algorithm(loss=f"{module}:{function}"), loss_inputs(policy, policy.detach())
        )
    assert str(caught.value).startswith(f"loss {module}:{function} at a test: {what}")
    assert "\n" not in str(caught.value)


def test_weights_have_no_gradient(module: str) -> None:
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    tokens = loss_inputs(policy, policy.detach())
    assert not weights_of(
        algorithm(weight=f"{module}:itself"), tokens
    ).weights.requires_grad


def episodes() -> list[ScoredEpisode]:
    lags = np.zeros(2, dtype=np.int32)
    return [ScoredEpisode(group, 1.0, np.zeros(2), lags=lags) for group in "ab"]


def test_ones_own_advantage_is_one_number_or_an_array_for_each_episode(
    module: str,
) -> None:
    settings = algorithm(advantage=f"{module}:counted", advantage_args={"most": 1})
    advantages = token_advantages(settings, episodes(), where="step 3")
    assert [advantage.advantages.tolist() for advantage in advantages] == [
        [1.0, 1.0],
        [1.0, 1.0],
    ]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", "step 3: ZeroDivisionError: division by zero (own_"),
        ("short", "step 3: 1 advantages of 2 episodes"),
        ("infinite", "step 3, group a: a value is not finite"),
        ("text", "step 3: 5 advantages of 2 episodes"),
        ("costly", "step 3: ValueError: assignment destination is read-only (own_"),
    ],
)
def test_a_faulty_advantage_is_named_in_one_line(
    module: str, function: str, what: str
) -> None:
    settings = algorithm(advantage=f"{module}:{function}")
    with pytest.raises(RunFailed) as caught:
        token_advantages(settings, episodes(), where="step 3")
    assert str(caught.value).startswith(f"advantage {module}:{function} at {what}")


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("raises", "ZeroDivisionError: division by zero (own_"),
        ("short", "1 rewards of 2 episodes"),
        ("infinite", "a reward is no finite number: inf"),
        ("missing", "the report half is no finite number: nan"),
        ("taken_name", "the report loss has the name of another metric"),
    ],
)
def test_a_faulty_reward_or_filter_is_named_in_one_line(module, function, what):
    group = [RewardedEpisode(1.0, {}, False, (2,), 10, "e", 0)] * 2
    with pytest.raises(RunFailed) as caught:
        rewarded(algorithm(reward=f"{module}:{function}"), group, where="group g1")
    assert str(caught.value).startswith(
        f"reward {module}:{function} at group g1: {what}"
    )
    with pytest.raises(
        RunFailed, match=f"filter {module}:text at group g1: the result is neither"
    ):
        filtered(algorithm(filter=f"{module}:text"), group, where="group g1")


def test_rewards_and_advantages_report_numbers_of_episodes(module: str) -> None:
    group = [
        RewardedEpisode(reward, {}, False, (2,), 10, "e", 0) for reward in (1.0, 3.0)
    ]
    episodes_rewarded = rewarded(
        algorithm(reward=f"{module}:shaped"), group, where="group g1"
    )
    assert [
        (episode.shaped_reward, episode.reports["half"])
        for episode in episodes_rewarded
    ] == [
        (0.5, 0.5),
        (1.5, 1.5),
    ]
    settings = algorithm(advantage=f"{module}:half_reported")
    assert [
        advantage.reports
        for advantage in token_advantages(settings, episodes(), where="")
    ] == [{"ones": 1.0}] * 2


def with_sources(config: Config) -> Config:
    return config.model_copy(update={"sources": source_digests(config.own_functions)})


def test_functions_are_loaded_with_the_source_of_the_runs_start_only(module, tmp_path):
    config = with_sources(small_config(algorithm={"reward": f"{module}:short"}))
    load_functions(config)
    (tmp_path / f"{module}.py").write_text(f"{OWN}\n# more\n")
    with pytest.raises(
        ConfigError, match=f"the source of {module}:short is not that with which"
    ):
        load_functions(config)


def test_a_replay_refuses_other_sources_and_arguments(
    module: str, tmp_path: Path
) -> None:
    name = f"{module}:steep"
    folder = tmp_path / "journal"
    config = with_sources(
        small_config(algorithm={"loss": name, "loss_args": {"factor": 2.0}})
    )
    with Journal(folder) as journal:
        journal.append(
            kinds.Start(format=1, run_id="run", functions={**used_functions(config)})
        )
    check_functions(config, folder)
    other = small_config(algorithm={"loss": name, "loss_args": {"factor": 3.0}})
    message = f"others than recorded: loss {name} {{'factor': 2.0}}, loss {name} {{'factor': 3.0}}"
    with pytest.raises(ConfigError, match=message.replace("'", '"')):
        check_functions(other, folder)
    with pytest.raises(ConfigError, match="others than recorded: loss"):
        check_functions(small_config(), folder)
    (tmp_path / f"{module}.py").write_text(f"{OWN}\n# more\n")
    with pytest.raises(ConfigError, match="others than recorded: loss"):
        check_functions(config, folder)


PENALTY: dict[str, JsonValue] = {
    "reward": "overlong",
    "reward_args": {"penalty": 0.5, "cache_tokens": 4},
}


def config(**algorithm: JsonValue) -> Config:
    lengths = {"max_reply_tokens": 10, "max_episode_tokens": 64}
    return small_config(algorithm={"group_size": 4, **algorithm}, sampling=lengths)


def shaped(trajectory: Trajectory, settings: Config) -> dict[str, float]:
    (sides,) = shaped_rewards([trajectory], settings)
    return {side.side: side.shaped_reward for side in sides}


def has_variance(group: list[Trajectory], settings: Config) -> bool:
    sides = shaped_rewards(group, settings)
    return unequal_rewards([side for episode in sides for side in episode])


def trajectory(reward: float, *, reply: int = 1, truncated: bool = False) -> Trajectory:
    status = Status.TRUNCATED if truncated else Status.COMPLETED
    return dataclasses.replace(make_trajectory(3, reply), reward=reward, status=status)


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (99, 1.0)],
)
def test_overlong_penalty_rises_linearly_over_the_last_tokens(
    tokens: int, penalty: float
) -> None:
    episode = RewardedEpisode(0.0, {}, False, (tokens,), 10, "e", 0)
    assert overlong([episode], penalty=1.0, cache_tokens=4) == [-penalty]


def test_sums_in_another_order_are_equal_rewards() -> None:
    for other, differs in ((0.3 + 0.2 + 0.1, False), (0.6 + 1e-6, True)):
        group = [trajectory(0.1 + 0.2 + 0.3), trajectory(other)]
        assert group[0].reward != group[1].reward
        assert has_variance(group, config()) is differs


def test_penalty_is_taken_off_the_reward_by_the_longest_reply() -> None:
    settings = config(**PENALTY)
    assert shaped(trajectory(1.0, reply=8), settings) == {"": 1.0 - 0.5 * 0.5}
    turns = dataclasses.replace(trajectory(1.0, reply=15), run_lengths=(3, 7, 0, 8))
    assert shaped(turns, settings) == {"": 0.75}


@pytest.mark.parametrize(
    ("own", "reply", "penalty"),
    [(0, 8, 0.25), (64, 8, 0.25), (8, 6, 0.25), (8, 8, 0.5), (2, 1, 0.25)],
)
def test_an_environment_with_a_limit_of_its_own_pays_by_that(own, reply, penalty):
    """The last case has a limit below the tokens over which the penalty rises."""
    short = dataclasses.replace(trajectory(1.0, reply=reply), max_reply_tokens=own)
    assert shaped(short, config(**PENALTY)) == {"": 1.0 - penalty}


def test_truncated_episodes_count_unless_they_are_filtered() -> None:
    cut = trajectory(1.0, truncated=True)
    assert is_counted(cut, config().algorithm)
    assert not is_counted(cut, config(leave_out_truncated=True).algorithm)
    assert is_counted(trajectory(1.0), config(leave_out_truncated=True).algorithm)


def test_variance_is_that_of_the_environments_rewards_whatever_the_penalties() -> None:
    alike = [trajectory(1.0, reply=2), trajectory(1.0, reply=10)]
    assert not has_variance(alike, config())
    assert not has_variance(alike, config(**PENALTY))
    # 1.0 - 0.5 and 0.5: the penalty takes the difference away.
    evened = [trajectory(1.0, reply=10), trajectory(0.5, reply=2)]
    assert has_variance(evened, config(**PENALTY))


def test_filtered_episodes_give_no_variance() -> None:
    group = [trajectory(1.0), trajectory(1.0), trajectory(0.0, truncated=True)]
    assert has_variance(group, config())
    assert not has_variance(group, config(leave_out_truncated=True))
    assert not has_variance(group[2:], config(leave_out_truncated=True))


@pytest.mark.parametrize("name", ["mean_of_rewards", "first_decides"])
def test_a_filter_is_never_called_with_a_group_in_which_no_episode_counts(
    name: str,
) -> None:
    settings = config(
        filter=f"{wrong_algorithms.__name__}:{name}", leave_out_truncated=True
    )
    cut = [trajectory(1.0, truncated=True)] * 2
    assert not is_trained(cut, settings)
    assert is_trained([*cut, trajectory(1.0)], settings)
    every = config(leave_out_truncated=True)
    assert is_trained(cut, every)


def played(first: float, second: float, *, reward: float = 0.0) -> Trajectory:
    trajectory = dataclasses.replace(
        make_trajectory(3, 4), run_lengths=(1, 1, 1, 1, 1, 2)
    )
    branches = (Branch(2, 1.0, "a", first), Branch(2), Branch(2, 1.0, "b", second))
    return dataclasses.replace(trajectory, reward=reward, branches=branches)


def test_a_name_with_a_reward_of_its_own_is_a_side() -> None:
    episode = played(0.25, -1.0, reward=0.5)
    assert shaped(episode, config()) == {"a": 0.25, "": 0.5, "b": -1.0}
    cut = config(reward="overlong", reward_args={"penalty": 0.5, "cache_tokens": 10})
    # The longest reply has 2 of 10 tokens.
    assert shaped(episode, cut) == pytest.approx({"a": 0.15, "": 0.4, "b": -1.1})


def test_a_group_has_variance_when_one_side_has_it() -> None:
    assert has_variance([played(1.0, 0.5), played(0.0, 0.5)], config())
    assert has_variance([played(1.0, 0.5), played(1.0, 0.0)], config())
    # Two sides are not compared with each other.
    assert not has_variance([played(1.0, 0.5), played(1.0, 0.5)], config())
