import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace

import pytest
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.verifiers import (
    Serving,
    Verifiers,
    _check_runtime,
    _is_worked_on_in_a_runtime,
    outcome_of,
)


@pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is not None, reason="verifiers is here"
)
def test_without_verifiers_one_line_says_where_to_install_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Verifiers("gsm8k-v1")
    assert str(caught.value) == (
        "the package 'verifiers' is missing: pip install 'verifiers>=0.4,<0.5' in a virtual "
        "environment of its own, and give its interpreter as `python` of the environment"
    )


def test_a_package_of_the_package_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    with pytest.raises(
        ConfigError, match="^the package 'verifiers' needs 'verifiers.v1', which"
    ):
        Verifiers("gsm8k-v1")


class Env:
    """Stands for an environment of verifiers whose first start fails."""

    def __init__(self) -> None:
        self.starts = 0
        self.ends = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.starts += 1
        await asyncio.sleep(0)
        if self.starts == 1:
            raise OSError("no port is free")
        try:
            yield
        finally:
            self.ends += 1


def test_what_episodes_share_starts_once_again_after_a_failure_and_ends_with_the_loop() -> (
    None
):
    env = Env()

    async def episodes() -> None:
        serving = Serving(env)
        failed = await asyncio.gather(
            serving.begin(), serving.begin(), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["no port is free"] * 2
        await asyncio.gather(serving.begin(), serving.begin())
        await serving.begin()
        assert (env.starts, env.ends) == (2, 0)

    asyncio.run(episodes())
    assert (env.starts, env.ends) == (2, 1)


def trace(agent: str, reward: float, *, trained: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        agent=SimpleNamespace(name=agent, trainable=trained),
        reward=reward,
        rewards={},
        metrics={},
        num_turns=2,
        is_truncated=False,
    )


@pytest.mark.parametrize(
    ("traces", "reward", "rewards"),
    [
        ([trace("buyer", 1.0), trace("seller", 3.0), trace("seller", 5.0)], 3.0,
         {"buyer": 1.0, "seller": 4.0}),
        ([trace("agent", 1.0), trace("agent", 2.0)], 1.5, {}),
        ([trace("agent", 1.0), trace("judge", 9.0, trained=False)], 1.0, {}),
    ],
)  # fmt: skip
def test_several_trained_agents_have_each_its_own_reward(traces, reward, rewards):
    outcome = outcome_of(traces)
    assert (outcome.reward, outcome.rewards) == (reward, rewards)
    assert outcome.shares == {
        t.agent.name: 0.0 for t in traces if not t.agent.trainable
    }


class Task:
    """Stands for the class of all tasks of verifiers."""

    NEEDS_CONTAINER = False

    async def setup(self, trace: object, runtime: object) -> None: ...

    async def stage_verifier(self, trace: object, runtime: object) -> None: ...


def rewards(function):
    function.reward = True
    return function


class JudgesReply(Task):
    @rewards
    async def right(self, trace: object) -> float:
        return 1.0


class SeedsSession(JudgesReply):
    async def setup(self, trace: object, runtime: object) -> None: ...


class JudgesReplyByProgram(Task):
    """Its judge is a program in the runtime, which nothing else is put into."""

    @rewards
    async def right(self, trace: object, runtime: object) -> float:
        return 1.0


class OfflineToo(Task):
    async def setup(self, runtime: object) -> None: ...

    @rewards
    async def right(self, trace: object, runtime: object | None = None) -> float:
        return 1.0


class StagesTests(Task):
    async def setup(self, runtime: object) -> None: ...

    @rewards
    async def solved(self, runtime: object, trace: object) -> float:
        return 1.0


class StagesVerifier(JudgesReplyByProgram):
    async def stage_verifier(self, trace: object, runtime: object) -> None: ...


class Contained(JudgesReply):
    NEEDS_CONTAINER = True


@pytest.mark.parametrize(
    ("task_type", "needs_shell"),
    [
        (JudgesReply, False),
        (SeedsSession, False),
        (JudgesReplyByProgram, False),
        (OfflineToo, False),
        (StagesTests, True),
        (StagesVerifier, True),
        (Contained, True),
    ],
)
def test_tasks_that_are_worked_on_in_a_runtime_are_told_from_conversations(
    task_type: type, needs_shell: bool, monkeypatch
) -> None:
    module = ModuleType("verifiers.v1.task")
    module.Task = Task
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verifiers.v1.task", module)
    assert _is_worked_on_in_a_runtime(task_type) is needs_shell


@pytest.mark.parametrize(
    ("runtime", "refusal"),
    [
        (None, "and none is named"),
        ({"type": "subprocess"}, "share this machine's files"),
        ({"type": "docker"}, ""),
        ({"type": "modal", "image": "python:3.12"}, ""),
    ],
)
def test_a_runtime_has_files_of_its_own_for_each_episode(runtime, refusal: str) -> None:
    if not refusal:
        _check_runtime("harbor", "solver", runtime)
        return
    with pytest.raises(ConfigError) as caught:
        _check_runtime("harbor", "solver", runtime)
    assert refusal in str(caught.value)
    assert 'set env = { solver = { runtime = { type = "docker" } } }' in str(
        caught.value
    )
