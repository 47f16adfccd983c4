"""Environments of gymnasium: each reply is an action, and a seed is a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from slipstream.client.environment import Environment, Message, StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.frameworks.packages import (
    check_at_least,
    import_function,
    import_package,
)
from slipstream.environments.frameworks.spaces import ActionReader, show_rendering, text_of
from slipstream.environments.frameworks.splits import Seeds, Split

# An environment of the package, and what it shows.
Game: TypeAlias = Any
Observation: TypeAlias = Any


class Gymnasium(Environment[int]):
    """Plays one episode of `gymnasium.make(id, **kwargs)`; the reward is the sum of its rewards.

    A reply is one action, a task the seed of `reset`: all members of a group begin alike. A reply
    without a legal action takes no step and adds `illegal_reward`; the `max_illegal`-th ends the
    episode. spaces.py says how observations and actions are written; with `render_mode = "ansi"`
    in `kwargs` the model reads what the environment draws.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        instruction: str = "",
        action_names: Sequence[str] = (),
        observe: str | None = None,
        act: str | None = None,
        split: Literal["train", "heldout"] = "train",
        heldout_one_in: int = 10,
        num_tasks: int | None = None,
        seed: int = 0,
        illegal_reward: float = -1.0,
        max_illegal: int = 3,
    ) -> None:
        """`instruction` opens the first message; `action_names` are words for numbered actions.

        `observe` is "module:function" of observation and info, and returns a text. `act` is one of
        reply and action space; it returns an action, or raises ValueError with what the model
        should write. ConfigError names what cannot work.
        """
        check_at_least("max_illegal", max_illegal, 1)
        self._library = import_package("gymnasium", install="gymnasium")
        self._id, self._kwargs = id, dict(kwargs or {})
        self._observe = import_function("observe", observe) if observe else None
        self._is_drawn = self._kwargs.get("render_mode") == "ansi" and self._observe is None
        self._instruction = instruction
        self._seeds = Seeds(Split(split, heldout_one_in), seed, num_tasks)
        self._illegal_reward, self._max_illegal = illegal_reward, max_illegal
        self._game: Game = None
        self._num_steps = self._num_illegal = 0
        self._reader = self._try_out(action_names, act)

    def tasks(self) -> list[int] | Iterator[int]:
        """Returns seeds: `num_tasks` of them, or an iterator without end."""
        return self._seeds.draw()

    def reset(self, task: int) -> list[Message]:
        """Begins the episode of one seed."""
        self._num_steps = self._num_illegal = 0
        self._game = self._make()
        observation, info = self._game.reset(seed=task)
        parts = (self._instruction, self._show(observation, info), self._reader.rule)
        return [Message("user", "\n".join(part for part in parts if part))]

    def step(self, reply: str) -> StepResult:
        """Takes the action of the reply."""
        try:
            action = self._reader.read(reply)
        except ValueError as error:
            self._num_illegal += 1
            if self._num_illegal >= self._max_illegal:
                return StepResult(self._illegal_reward, metrics=self._metrics())
            again = [Message("user", str(error) or self._reader.rule)]
            return StepResult(self._illegal_reward, done=False, messages=again)
        observation, reward, terminated, truncated, info = self._game.step(action)
        self._num_steps += 1
        if terminated or truncated:
            ended = {"terminated": float(terminated), "out_of_time": float(truncated)}
            return StepResult(float(reward), metrics=self._metrics() | ended)
        shown = [Message("user", self._show(observation, info))]
        return StepResult(float(reward), done=False, messages=shown, metrics=self._metrics())

    def close(self) -> None:
        """Frees what the environment took."""
        if self._game is not None:
            self._game.close()

    def _metrics(self) -> dict[str, float]:
        return {"steps": float(self._num_steps), "illegal": float(self._num_illegal)}

    def _make(self) -> Game:
        return self._library.make(self._id, **self._kwargs)

    def _show(self, observation: Observation, info: Mapping[str, Any]) -> str:
        if self._observe is not None:
            return str(self._observe(observation, info))
        if self._is_drawn:
            return show_rendering(self._game.render())
        return text_of(self._game.observation_space, observation)

    def _try_out(self, action_names: Sequence[str], act: str | None) -> ActionReader:
        """Begins one episode, so that what cannot work is refused before anything starts."""
        import_act = import_function("act", act) if act else None
        try:
            self._game = self._make()
        except (self._library.error.Error, ModuleNotFoundError, TypeError) as error:
            raise ConfigError(f"id {self._id!r}: {' '.join(str(error).split())}") from error
        try:
            reader = ActionReader(self._game.action_space, action_names, import_act)
            self._show(*self._game.reset(seed=0))
        finally:
            self._game.close()
            self._game = None
        return reader
