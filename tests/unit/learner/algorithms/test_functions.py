"""Functions of an algorithm by name: the built-in ones, and modules of one's own."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.settings.algorithm_functions import FUNCTIONS
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.episodes import RewardedEpisode, ScoredEpisode
from slipstream.learner.algorithms.functions import (
    filtered,
    function_of,
    load_functions,
    rewarded,
    token_advantages,
    used_functions,
)
from slipstream.learner.algorithms.token_functions import Reduce, step_columns
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.trainer.replay import check_functions
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
    ("kind", "name"), [(kind, name) for kind, names in FUNCTIONS.items() for name in names]
)
def test_built_in_functions_have_the_arguments_of_their_settings(kind, name):
    given = {"cache_tokens": 1} if name == "overlong" else {}
    needs = {"kl": {"coefficient": 1.0}} if name == "none" else {}
    found = function_of(algorithm(**{kind: name, f"{kind}_args": given}, **needs), kind)
    _, *keywords = inspect.signature(found.call.func).parameters.values()  # type: ignore[attr-defined]
    assert all(each.kind is each.KEYWORD_ONLY for each in keywords)
    fields = FUNCTIONS[kind][name].model_fields
    defaults = {
        name: inspect.Parameter.empty if field.is_required() else field.default
        for name, field in fields.items()
    }
    assert {each.name: each.default for each in keywords} == defaults


def test_ones_own_loss_is_called_with_its_arguments_and_reports_by_name(module: str) -> None:
    own = {"loss": f"{module}:steep", "loss_args": {"factor": 3}}
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    found = terms_of(algorithm(**own), loss_inputs(policy, policy.detach()))
    assert found.losses.tolist() == [6.0, 3.0]
    assert found.reports["steep_fraction"].tolist() == [True, True]
    columns = step_columns(algorithm(**own), has_reference=False)
    found = {column.name: column.reduce for column in columns}
    assert found["steep_fraction"] is Reduce.MEAN
    assert found["steep_max"] is Reduce.LARGEST
    assert found[f"loss {module}:steep"] is Reduce.FAULTS


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("steep", {}, "algorithm.loss_args: loss {} needs the argument 'factor'"),
        ("steep", {"factor": 0}, "factor of loss {}: input should be greater than 0, got 0"),
        ("steep", {"factor": 1, "side": "up"}, "side of loss {}: input should be 'low' or 'high'"),
        ("steep", {"factr": 1}, "loss {} has no argument 'factr'; known: factor, side"),
        ("loose", {}, "loss {} takes its inputs, and arguments behind a star: not factor: float"),
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
        ("nowhere_to_be_found:loss", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        (f"{module}_broken:loss", f"SyntaxError: '(' was never closed ({module}_broken.py:2)"),
    ):
        with pytest.raises(ConfigError) as caught:
            function_of(algorithm(loss=name), "loss")
        assert str(caught.value).endswith(f"in {tmp_path} or Python's path failed: {cause}")


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
def test_a_faulty_loss_is_named_in_one_line(module: str, function: str, what: str) -> None:
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    with pytest.raises(RunFailed) as caught:
        terms_of(algorithm(loss=f"{module}:{function}"), loss_inputs(policy, policy.detach()))
    assert str(caught.value).startswith(f"loss {module}:{function} at a test: {what}")
    assert "\n" not in str(caught.value)


def test_weights_have_no_gradient(module: str) -> None:
    policy = torch.tensor([-2.0, -1.0], requires_grad=True)
    tokens = loss_inputs(policy, policy.detach())
    assert not weights_of(algorithm(weight=f"{module}:detached"), tokens).weights.requires_grad


def episodes() -> list[ScoredEpisode]:
    lags = np.zeros(2, dtype=np.int32)
    return [ScoredEpisode(group, 1.0, np.zeros(2), lags=lags) for group in "ab"]


def test_ones_own_advantage_is_one_number_or_an_array_for_each_episode(module: str) -> None:
    settings = algorithm(advantage=f"{module}:counted", advantage_args={"most": 1})
    found = token_advantages(settings, episodes(), where="step 3")
    assert [one.advantages.tolist() for one in found] == [[1.0, 1.0], [1.0, 1.0]]


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
def test_a_faulty_advantage_is_named_in_one_line(module: str, function: str, what: str) -> None:
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
    assert str(caught.value).startswith(f"reward {module}:{function} at group g1: {what}")
    with pytest.raises(RunFailed, match=f"filter {module}:text at group g1: the result is neither"):
        filtered(algorithm(filter=f"{module}:text"), group, where="group g1")


def test_rewards_and_advantages_report_numbers_of_episodes(module: str) -> None:
    group = [RewardedEpisode(reward, {}, False, (2,), 10, "e", 0) for reward in (1.0, 3.0)]
    found = rewarded(algorithm(reward=f"{module}:shaped"), group, where="group g1")
    assert [(one.reward, one.reports["half"]) for one in found] == [(0.5, 0.5), (1.5, 1.5)]
    settings = algorithm(advantage=f"{module}:half_reported")
    assert [one.reports for one in token_advantages(settings, episodes(), where="")] == [
        {"ones": 1.0}
    ] * 2


def with_sources(config: Config) -> Config:
    return config.model_copy(update={"sources": source_digests(config.algorithm)})


def test_functions_are_loaded_with_the_source_of_the_runs_start_only(module, tmp_path):
    config = with_sources(small_config(algorithm={"reward": f"{module}:short"}))
    load_functions(config)
    (tmp_path / f"{module}.py").write_text(f"{OWN}\n# more\n")
    with pytest.raises(ConfigError, match=f"the source of {module}:short is not that with which"):
        load_functions(config)


def test_a_replay_refuses_other_sources_and_arguments(module: str, tmp_path: Path) -> None:
    name, folder = f"{module}:steep", tmp_path / "journal"
    config = with_sources(small_config(algorithm={"loss": name, "loss_args": {"factor": 2.0}}))
    with Journal(folder) as journal:
        journal.append(kinds.Start(format=1, run_id="run", functions={**used_functions(config)}))
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
