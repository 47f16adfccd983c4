"""An environment of gymnasium with a few named actions, as an example to change: copy this file.

Each reply is one action, and a task is the seed of gymnasium's `reset`. `pip install gymnasium`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from slipstream.client.environment import Environment, Message, StepResult, answer_of

# A terminal's colour codes around text, and any other code.
COLOURED = re.compile(r"(?:\x1b\[(?!0?m)[0-9;]+m)+([^\x1b]*)(?:\x1b\[0?m)+")
CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Game(Environment[int]):
    """Plays one episode of `gymnasium.make(id, **kwargs)`; the reward is the sum of its rewards.

    The last of `actions` that a reply names is taken. A reply without one takes no step and costs
    1; the third one ends the episode. With `render_mode = "ansi"` the model reads the environment's
    own drawing, with brackets around what has a colour.
    """

    def __init__(
        self,
        id: str,
        actions: Sequence[str],
        kwargs: Mapping[str, Any] | None = None,
        instruction: str = "",
        first_seed: int = 0,
        num_tasks: int = 1000,
    ) -> None:
        """`actions` name the actions of a Discrete space in order; others raise ValueError."""
        self._id, self._kwargs, self._actions = id, dict(kwargs or {}), list(actions)
        self._instruction = instruction
        self._seeds = range(first_seed, first_seed + num_tasks)
        self._game = gymnasium.make(id, **self._kwargs)
        size = getattr(self._game.action_space, "n", None)
        if size != len(self._actions):
            raise ValueError(f"{id} has {size} actions, and {len(self._actions)} have a name")
        self._num_illegal = 0

    def tasks(self) -> range:
        """Returns the seeds."""
        return self._seeds

    def reset(self, task: int) -> list[Message]:
        """Begins the episode of the seed `task`."""
        self._game = gymnasium.make(self._id, **self._kwargs)
        self._num_illegal = 0
        observation, _ = self._game.reset(seed=task)
        return [Message("user", f"{self._instruction}\n{self._show(observation)}".strip())]

    def step(self, reply: str) -> StepResult:
        """Takes the reply's action."""
        names = "|".join(map(re.escape, self._actions))
        found = re.findall(rf"(?<!\w)(?:{names})(?!\w)", answer_of(reply))
        if not found:
            self._num_illegal += 1
            reward = -1.0
            done = self._num_illegal == 3
            shown = f"Reply with one of: {', '.join(self._actions)}."
        else:
            action = self._actions.index(found[-1])
            observation, reward, terminated, truncated, _ = self._game.step(action)
            done = terminated or truncated
            shown = self._show(observation)
        # Nobody reads what the game shows at its end.
        messages = [] if done else [Message("user", shown)]
        return StepResult(float(reward), done=done, messages=messages)

    def close(self) -> None:
        """Closes gymnasium's environment."""
        self._game.close()

    def _show(self, observation: object) -> str:
        drawn = self._game.render() if self._kwargs.get("render_mode") == "ansi" else observation
        return CODE.sub("", COLOURED.sub(r"[\1]", str(drawn))).strip("\n")
