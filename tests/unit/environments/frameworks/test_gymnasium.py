import copy
import itertools
import json
import random
import sys
from pathlib import Path

import numpy
import pytest
from slipstream.client.environment import StepResult
from slipstream.client.environment_loader import load_environment
from slipstream.core.errors import ConfigError, EnvironmentFailed

gymnasium = pytest.importorskip("gymnasium", reason="pip install gymnasium")

from slipstream.environments.frameworks.gymnasium import (  # noqa: E402
    ActionReader,
    Gymnasium,  # noqa: E402
    show_rendering,
    text_of,
)

REFERENCE = "slipstream.environments.frameworks.gymnasium:Gymnasium"
spaces = gymnasium.spaces
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FUNCTIONS = """
def observe(observation, info):
    return f"cart at {observation[0]:.1f}"

def act(reply, space):
    if reply not in ("left", "right"):
        raise ValueError("left or right?")
    return ("left", "right").index(reply)

def nothing(reply, space):
    raise ValueError
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_functions", raising=False)
    return "my_functions"


def refusal(*args: object, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Gymnasium(*args, **settings)
    return str(caught.value)


def played(environment: Gymnasium, task: int, replies: list[str]) -> list[StepResult]:
    """The verdicts of one episode, until it is done or the replies end."""
    episode = copy.copy(environment)
    episode.reset(task)
    verdicts = []
    for reply in replies:
        verdicts.append(episode.step(reply))
        if verdicts[-1].done:
            break
    episode.close()
    return verdicts


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("FrozenLake-v1", {}),
        ("Taxi-v4", {"max_episode_steps": 30}),
        ("CartPole-v1", {}),
        ("Blackjack-v1", {}),
        ("CliffWalking-v1", {"max_episode_steps": 30}),
    ],
)
def test_an_episode_is_the_packages_own(id: str, kwargs: dict) -> None:
    environment = Gymnasium(id, kwargs)
    own = gymnasium.make(id, **kwargs)
    chance = random.Random(1)
    replies = [str(chance.randrange(own.action_space.n)) for _ in range(600)]
    own.reset(seed=7)
    rewards = []
    for reply in replies:
        _, reward, terminated, truncated, _ = own.step(int(reply))
        rewards.append(float(reward))
        if terminated or truncated:
            break
    verdicts = played(environment, 7, replies)
    assert [verdict.reward for verdict in verdicts] == rewards
    assert [verdict.done for verdict in verdicts] == [False] * (len(rewards) - 1) + [True]
    assert verdicts[-1].metrics == {
        "steps": len(rewards),
        "illegal": 0.0,
        "terminated": float(terminated),
        "out_of_time": float(truncated),
    }


def test_an_episode_that_runs_out_of_time_is_over_and_says_so() -> None:
    (*_, last) = played(Gymnasium("CliffWalking-v1", {"max_episode_steps": 4}), 0, ["0"] * 9)
    assert last.done
    assert last.metrics == {"steps": 4.0, "illegal": 0.0, "terminated": 0.0, "out_of_time": 1.0}


def test_members_of_a_group_begin_alike_and_tasks_differ() -> None:
    environment = Gymnasium("CartPole-v1")
    first, again, other = (copy.copy(environment).reset(task) for task in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_reply_without_an_action_takes_no_step_and_the_last_of_some_ends_the_episode() -> None:
    environment = Gymnasium("FrozenLake-v1", {"is_slippery": False}, max_illegal=2)
    verdicts = played(environment, 0, ["north", "2", "9", "2"])
    assert [verdict.reward for verdict in verdicts] == [-1.0, 0.0, -1.0]
    assert verdicts[0].messages[0].content == "Reply with a whole number from 0 to 3."
    assert verdicts[1].messages[0].content == "1"
    assert verdicts[2].done
    assert verdicts[2].metrics == {"steps": 1.0, "illegal": 2.0}


def test_the_first_message_has_instruction_observation_and_rule() -> None:
    environment = Gymnasium(
        "FrozenLake-v1",
        {"render_mode": "ansi", "is_slippery": False},
        instruction="Reach G.",
        action_names=["left", "down", "right", "up"],
    )
    (message,) = environment.reset(0)
    assert message.content.splitlines() == [
        *("Reach G.", "[S]FFF", "FHFH", "FFFH", "HFFG"),
        "Reply with one of: left, down, right, up.",
    ]
    verdict = environment.step("Not left, I go Right!")
    assert verdict.messages[0].content.splitlines()[1] == "S[F]FF"
    environment.close()


def test_functions_of_the_user_take_the_place_of_the_rules(functions: str) -> None:
    environment = Gymnasium(
        "CartPole-v1", observe=f"{functions}:observe", act=f"{functions}:act", instruction="Hold!"
    )
    (message,) = copy.copy(environment).reset(0)
    assert message.content == "Hold!\ncart at 0.0"
    wrong, right = played(environment, 0, ["up", "right"])
    assert wrong.messages[0].content == "left or right?"
    assert right.reward == 1.0


def test_seeds_are_tasks_and_those_held_out_are_never_trained() -> None:
    trained = list(itertools.islice(Gymnasium("CartPole-v1").tasks(), 200))
    heldout = Gymnasium("CartPole-v1", split="heldout", num_tasks=20, seed=50).tasks()
    assert len(heldout) == 20
    assert min(heldout) >= 50
    assert not set(trained) & set(heldout)
    assert Gymnasium("CartPole-v1", num_tasks=3).tasks() == trained[:3]


def test_observations_of_every_space_that_has_a_text() -> None:
    box = spaces.Box(-1, 1, (2, 2), numpy.float32)
    assert text_of(box, numpy.array([[0.123456, -1], [0, 1e-7]])) == "0.1235 -1\n0 1e-07"
    assert text_of(spaces.Box(0, 9, (), numpy.float32), numpy.array(3.5)) == "3.5"
    assert text_of(spaces.MultiDiscrete([3, 4]), numpy.array([2, 3])) == "2 3"
    assert text_of(spaces.MultiBinary(3), numpy.array([1, 0, 1])) == "1 0 1"
    assert text_of(spaces.Text(9), "a b") == "a b"
    both = spaces.Tuple([spaces.Discrete(32), spaces.Discrete(2)])
    assert text_of(both, (14, 1)) == "14 1"
    named = spaces.Dict({"at": spaces.Discrete(4), "goal": spaces.Discrete(4)})
    assert text_of(named, {"at": 1, "goal": 3}) == "at: 1\ngoal: 3"


def test_actions_of_every_space_that_can_be_read() -> None:
    def read(space: object, reply: str) -> object:
        return ActionReader(space, [], None).read(reply)

    assert read(spaces.Discrete(5, start=-2), "from 9 to -2.") == -2
    assert read(spaces.Discrete(5, start=-2), "2 of 3 is 1") == 1
    assert read(spaces.Text(5), " abc\n") == "abc"
    several = spaces.MultiDiscrete([3, 4])
    assert read(several, "1 then 2 and 3").tolist() == [2, 3]
    box = spaces.Box(numpy.float32([-1, 0]), numpy.float32([1, 9]))
    assert read(box, "steer -.5, gas 1e0").tolist() == [-0.5, 1.0]
    assert read(spaces.MultiBinary(2), "0 1").tolist() == [0, 1]
    pixels = spaces.Box(0, 255, (2,), numpy.uint8)
    assert read(pixels, "255 5.0").tolist() == [255, 5]
    for space, reply in [
        (spaces.Discrete(5), "five"),
        (spaces.Discrete(5), "5"),
        (spaces.Discrete(5), "1.5"),
        (spaces.Discrete(5), "9" * 30),
        (spaces.Text(3), "abcd"),
        (several, "1"),
        (several, "1 9"),
        (several, "-1 1"),
        (box, "0.5 99"),
        (box, "nan inf"),
        (box, "1e999 1"),
        # None of these fits into a byte.
        (pixels, "300 5"),
        (pixels, "1.5 5"),
        (pixels, "1e30 5"),
        (spaces.MultiBinary(2), "257 0"),
        (spaces.Discrete(3, dtype=numpy.int8), "300"),
        (spaces.Discrete(3, dtype=numpy.uint8), "-1"),
        # It is finite only before the cast.
        (spaces.Box(-numpy.inf, numpy.inf, (1,), numpy.float32), "1e39"),
    ]:
        with pytest.raises(ValueError, match="Reply with"):
            read(space, reply)


@pytest.mark.parametrize(
    ("space", "rule"),
    [
        (spaces.Discrete(3, start=1), "Reply with a whole number from 1 to 3."),
        (spaces.MultiDiscrete([3, 4]), "Reply with 2 numbers: 0 to 2, 0 to 3."),
        (spaces.MultiBinary(3), "Reply with 3 numbers: each from 0 to 1."),
        (spaces.Box(-2, 2, (1,)), "Reply with a number from -2 to 2."),
        (spaces.Text(5), "Reply with 1 to 5 characters."),
    ],
)
def test_the_rule_of_each_space(space: object, rule: str) -> None:
    assert ActionReader(space, [], None).rule == rule


def test_colours_of_a_drawing_become_brackets() -> None:
    drawn = "\x1b[43m\x1b[35mY\x1b[0m\x1b[0m: \x1b[34;1mR\x1b[0m \x1b[2K\n"
    assert show_rendering(drawn) == "[Y]: [R] "


def test_what_cannot_work_is_named(functions: str) -> None:
    assert refusal("Frozenlake-v1") == (
        "id 'Frozenlake-v1': Environment `Frozenlake` doesn't exist. Did you mean: `FrozenLake`?"
    )
    assert "unexpected keyword argument 'foo'" in refusal("CartPole-v1", {"foo": 1})
    assert "pip install" in refusal("Humanoid-v5")
    assert "action_names are one for each action" in refusal("CartPole-v1", action_names=["a"])
    assert refusal("CartPole-v1", observe="x") == "observe must be module:function, got 'x'"
    assert refusal("CartPole-v1", act=f"{functions}:acts") == (
        "act: module my_functions has no function 'acts'"
    )
    assert refusal("CartPole-v1", act="no_module:act") == "act: there is no module 'no_module'"
    assert refusal("CartPole-v1", seed=-1) == "seed must be at least 0, got -1"
    assert refusal("CartPole-v1", max_illegal=0) == "max_illegal must be at least 1, got 0"


def test_a_space_without_text_asks_for_a_function() -> None:
    with pytest.raises(ConfigError, match="have no text; give observe"):
        text_of(spaces.Sequence(spaces.Discrete(3)), ())
    with pytest.raises(ConfigError, match="are too much text; give observe"):
        text_of(spaces.Box(0, 255, (64, 64, 3)), numpy.zeros((64, 64, 3)))
    with pytest.raises(ConfigError, match="are not read by themselves; give act"):
        ActionReader(spaces.Tuple([spaces.Discrete(2)]), [], None)


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvironmentFailed) as caught:
        load_environment(REFERENCE, json.dumps({"id": "CartPole-v1"}), "")
    assert str(caught.value) == "the package 'gymnasium' is missing: pip install gymnasium"
