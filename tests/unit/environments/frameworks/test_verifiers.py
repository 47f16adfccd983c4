import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace

import pytest
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.verifiers import Serving, Verifiers, outcome_of


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is here")
def test_without_verifiers_one_line_says_where_to_install_it() -> None:
    with pytest.raises(ConfigError) as caught:
        Verifiers("gsm8k-v1")
    assert str(caught.value) == (
        "the package 'verifiers' is missing: pip install 'verifiers>=0.4,<0.5' in a virtual "
        "environment of its own, and give its interpreter as `python` of the environment"
    )


def test_a_package_of_the_package_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    with pytest.raises(ConfigError, match="^the package 'verifiers' needs 'verifiers.v1', which"):
        Verifiers("gsm8k-v1")


class Env:
    """Stands for an environment of verifiers whose first start fails."""

    def __init__(self) -> None:
        self.starts, self.ends = 0, 0

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


def test_what_episodes_share_starts_once_again_after_a_failure_and_ends_with_the_loop() -> None:
    env = Env()

    async def episodes() -> None:
        serving = Serving(env)
        failed = await asyncio.gather(serving.begin(), serving.begin(), return_exceptions=True)
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
    assert outcome.shares == {t.agent.name: 0.0 for t in traces if not t.agent.trainable}
