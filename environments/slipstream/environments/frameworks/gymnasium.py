"""Environments of gymnasium: each reply is an action, and a seed is a task."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from slipstream.client.environment import Environment, Message, StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.arguments import Split, check_at_least
from slipstream.environments.frameworks.packages import import_function, import_package

# An environment of gymnasium, a space, and one of a space's values.
Game: TypeAlias = Any
Space: TypeAlias = Any
Value: TypeAlias = Any

# Most numbers in one observation or action; more make too long a text for a model.
MAX_NUMBERS = 256
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
WHOLE = re.compile(r"(?<![\w.])[-+]?\d{1,18}(?![\w])(?!\.\d)")
# A terminal's colour codes around text, and any other code.
COLOURED = re.compile(r"(?:\x1b\[(?!0?m)[0-9;]+m)+([^\x1b]*)(?:\x1b\[0?m)+")
CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Gymnasium(Environment[int]):
    """Plays one episode of `gymnasium.make(id, **kwargs)`; the reward is the sum of its rewards.

    A reply is one action. A task is a seed for gymnasium's `reset`, so all members of a group begin
    in the same state. A reply without a legal action takes no step and adds `illegal_reward`; the
    `max_illegal`-th such reply ends the episode. `text_of` and `ActionReader` say how observations
    and actions are written; with `render_mode = "ansi"` in `kwargs` the model reads the
    environment's own drawing.
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
        """`instruction` is the text before the first observation; `action_names` name the actions.

        `observe` names a "module:function" that turns observation and info into a text. `act` names
        a "module:function" that turns reply and action space into an action. It may raise
        ValueError, whose text tells the model what to write. Raises ConfigError for arguments that
        cannot work.
        """
        check_at_least("max_illegal", max_illegal, 1)
        check_at_least("seed", seed, 0)
        check_at_least("num_tasks", num_tasks, 1)
        self._library = import_package("gymnasium", install="gymnasium")
        self._id, self._kwargs = id, dict(kwargs or {})
        self._observe = import_function("observe", observe) if observe else None
        self._is_drawn = self._kwargs.get("render_mode") == "ansi" and self._observe is None
        self._instruction = instruction
        self._split = Split(split, heldout_one_in)
        self._seed, self._num_tasks = seed, num_tasks
        self._illegal_reward, self._max_illegal = illegal_reward, max_illegal
        self._game: Game = None
        self._num_steps = self._num_illegal = 0
        self._reader = self._try_out(action_names, act)

    def tasks(self) -> list[int] | Iterator[int]:
        """Returns `num_tasks` seeds, or an endless iterator of seeds if `num_tasks` is None."""
        drawn = (n for n in itertools.count(self._seed) if self._split.has(str(n)))
        return drawn if self._num_tasks is None else list(itertools.islice(drawn, self._num_tasks))

    def reset(self, task: int) -> list[Message]:
        """Begins the episode of the seed `task`, and returns the first observation."""
        self._num_steps = self._num_illegal = 0
        self._game = self._make()
        observation, info = self._game.reset(seed=task)
        parts = (self._instruction, self._show(observation, info), self._reader.rule)
        return [Message("user", "\n".join(part for part in parts if part))]

    def step(self, reply: str) -> StepResult:
        """Takes the reply's action; returns the action's reward and the next observation."""
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
        """Closes the environment of gymnasium."""
        if self._game is not None:
            self._game.close()

    def _metrics(self) -> dict[str, float]:
        return {"steps": float(self._num_steps), "illegal": float(self._num_illegal)}

    def _make(self) -> Game:
        return self._library.make(self._id, **self._kwargs)

    def _show(self, observation: Value, info: Mapping[str, Any]) -> str:
        if self._observe is not None:
            return str(self._observe(observation, info))
        if self._is_drawn:
            return show_rendering(self._game.render())
        return text_of(self._game.observation_space, observation)

    def _try_out(self, action_names: Sequence[str], act: str | None) -> ActionReader:
        """Begins one episode to check the arguments, and returns the reader of actions.

        Raises ConfigError for arguments that cannot work.
        """
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


class ActionReader:
    """Reads the actions of one space; `rule` tells the model what to write."""

    def __init__(
        self, space: Space, names: Sequence[str], function: Callable[..., Any] | None
    ) -> None:
        """Reads actions by `function` if given, else as one of `names`, numbers or text.

        Raises ConfigError if `names` do not fit the space, or its actions have no text form.
        """
        self._space, self._function = space, function
        self._names = list(names)
        self._name: re.Pattern[str] | None = None
        kind = _kind(space)
        if names and (kind != "Discrete" or len(names) != space.n or function is not None):
            raise ConfigError(
                f"action_names are one for each action of a Discrete space, read without act; "
                f"got {len(names)} for {space}"
            )
        if names:
            longest_first = sorted(names, key=len, reverse=True)
            either = "|".join(map(re.escape, longest_first))
            self._name = re.compile(rf"(?<!\w)(?:{either})(?!\w)", re.IGNORECASE)
        self.rule = "" if function is not None else self._rule(kind)

    def read(self, reply: str) -> Value:
        """Returns the action of a reply. Raises ValueError if the space contains no such action."""
        if self._function is not None:
            return self._function(reply, self._space)
        action = self._parse(reply)
        if action is None or not self._space.contains(action):
            raise ValueError(self.rule)
        return action

    def _parse(self, reply: str) -> Value:
        space = self._space
        if self._name is not None:
            found = self._name.findall(reply)
            lower = [name.lower() for name in self._names]
            return space.dtype.type(lower.index(found[-1].lower()) + space.start) if found else None
        match _kind(space):
            case "Discrete":
                whole = WHOLE.findall(reply)
                try:
                    return space.dtype.type(int(whole[-1])) if whole else None
                except OverflowError:
                    return None
            case "Text":
                return reply.strip()
        import numpy

        size = math.prod(space.shape)
        pattern = NUMBER if _kind(space) == "Box" else WHOLE
        numbers = [float(number) for number in pattern.findall(reply)[-size:]]
        if len(numbers) < size or not all(map(math.isfinite, numbers)):
            return None
        given = numpy.array(numbers)
        with numpy.errstate(all="ignore"):
            action = given.astype(space.dtype)
        # A cast to a byte turns 300 into 44. A cast to a float may round, which keeps the action,
        # but turns a number that is too large into infinity.
        is_float = action.dtype.kind == "f"
        if not (numpy.isfinite(action).all() if is_float else numpy.array_equal(action, given)):
            return None
        return action.reshape(space.shape)

    def _rule(self, kind: str) -> str:
        space = self._space
        match kind:
            case "Discrete" if self._names:
                return f"Reply with one of: {', '.join(self._names)}."
            case "Discrete":
                last = int(space.start + space.n) - 1
                return f"Reply with a whole number from {int(space.start)} to {last}."
            case "MultiDiscrete" | "MultiBinary" | "Box":
                return _rule_of_numbers(space, kind)
            case "Text":
                return f"Reply with {space.min_length} to {space.max_length} characters."
        raise ConfigError(f"actions of {space} are not read by themselves; give act")


def text_of(space: Space, value: Value) -> str:
    """Returns an observation as text. Raises ConfigError when its space has no text form."""
    match _kind(space):
        case "Discrete":
            return str(int(value))
        case "MultiDiscrete" | "MultiBinary" | "Box":
            return _numbers(space, value)
        case "Text":
            return str(value)
        case "Tuple":
            return " ".join(text_of(each, part) for each, part in zip(space, value, strict=True))
        case "Dict":
            return "\n".join(f"{key}: {text_of(space[key], value[key])}" for key in space)
    raise ConfigError(f"observations of {space} have no text; give observe = 'module:function'")


def show_rendering(drawn: Value) -> str:
    """Returns an ANSI rendering as plain text, with [ ] around the parts that have a color.

    Raises ConfigError if the rendering is no text.
    """
    if not isinstance(drawn, str):
        raise ConfigError("render_mode = 'ansi' draws no text here; give observe")
    return CODE.sub("", COLOURED.sub(r"[\1]", drawn)).strip("\n")


def _kind(space: Space) -> str:
    return type(space).__name__


def _numbers(space: Space, value: Value) -> str:
    import numpy

    rows = numpy.asarray(value)
    if rows.size > MAX_NUMBERS or rows.ndim > 2:
        raise ConfigError(
            f"observations of shape {rows.shape} are too much text; give observe or render_mode"
        )
    rows = rows.reshape(-1, rows.shape[-1] if rows.ndim else 1)
    return "\n".join(" ".join(f"{number:.4g}" for number in row) for row in rows.tolist())


def _rule_of_numbers(space: Space, kind: str) -> str:
    import numpy

    size = math.prod(space.shape)
    if size > MAX_NUMBERS:
        raise ConfigError(f"actions of {space} have more than {MAX_NUMBERS} numbers; give act")
    if kind == "Box":
        low, high = space.low, space.high
    else:
        low = numpy.zeros(space.shape) + getattr(space, "start", 0)
        high = low + (space.nvec if kind == "MultiDiscrete" else 2) - 1
    bounds = [
        f"{least:.4g} to {most:.4g}"
        for least, most in zip(low.ravel().tolist(), high.ravel().tolist(), strict=True)
    ]
    if size == 1:
        return f"Reply with a number from {bounds[0]}."
    if len(set(bounds)) == 1:
        bounds = [f"each from {bounds[0]}"]
    return f"Reply with {size} numbers: {', '.join(bounds)}."
