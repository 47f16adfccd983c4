"""Two environments of OpenEnv as its documents show them; run by uvicorn in OpenEnv's own Python.

uvicorn openenv_games:guess --port 8000
"""

from __future__ import annotations

import os
import random

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = int(os.environ.get("SESSIONS", "100"))


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    hint: str = ""


class Guess(Environment[GuessAction, GuessObservation, State]):
    """One of three digits is wanted; a hint leads on. 777 raises, 888 ends the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._wanted = random.Random(seed).randrange(3)
        self._state = State(episode_id=episode_id)
        return GuessObservation(hint="a digit below 3")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.guess == 777:
            raise ValueError("777 is not allowed")
        if action.guess == 888:
            os._exit(3)
        right = action.guess == self._wanted
        hint = "right" if right else ("more" if action.guess < self._wanted else "less")
        return GuessObservation(
            hint=hint,
            done=right or self._state.step_count == 3,
            reward=float(right),
            metadata={"steps": self._state.step_count},
        )

    @property
    def state(self):
        return self._state


class WriteAction(Action):
    text: str
    place: str = "end"


class WriteObservation(Observation):
    page: str = ""
    length: int = 0


class Write(Environment[WriteAction, WriteObservation, State]):
    """A page grows by what is written; each vowel is worth a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, first="", **kwargs):
        self._page = first
        self._state = State(episode_id=episode_id)
        return WriteObservation(page=self._page, length=len(self._page))

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        parts = (self._page, action.text) if action.place == "end" else (action.text, self._page)
        self._page = "".join(parts)
        return WriteObservation(
            page=self._page,
            length=len(self._page),
            done=self._state.step_count == 2,
            reward=sum(letter in "aeiou" for letter in action.text) / 10,
        )

    @property
    def state(self):
        return self._state


guess = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=SESSIONS)
write = create_fastapi_app(Write, WriteAction, WriteObservation, max_concurrent_envs=SESSIONS)
