"""A model behind an endpoint with OpenAI's API that scores replies.

Waits for: the endpoint. Unblocked by: its answer, or `timeout_s` after the last retry began.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import ClassVar, Literal, TypedDict, TypeVar, Unpack

from pydantic import BaseModel, Field, ValidationError
from slipstream.client.agent import Endpoint
from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import faults_as, in_one_line, openai_client
from slipstream.environments.arguments import check_above_0, check_at_least, check_choice

Answer = TypeVar("Answer", bound="Form")
NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
FIELD = re.compile(r"\{(\w+)\}")
# Stands where each call names its own address.
NOWHERE = "http://127.0.0.1:0/v1"
# No score needs a longer answer.
MAX_ANSWER_BYTES = 4 << 20


class Form(BaseModel, strict=True):
    """The part of an answer that is read; `kind` names it in errors."""

    kind: ClassVar[str]


class _Message(BaseModel, strict=True):
    content: str | None = None


class _Choice(BaseModel, strict=True):
    message: _Message
    finish_reason: str | None = None


class _Completion(Form):
    kind = "OpenAI's chat completions do"
    choices: list[_Choice] = Field(min_length=1)


class CallLimits(TypedDict, total=False):
    """Limits of the calls to a server of scores: 16 open ones, 60 s for each, 5 repetitions."""

    max_open: int
    timeout_s: float
    max_retries: int


class JudgeOptions(CallLimits, total=False):
    """The arguments of a `Judge` that say how it is asked, as `Judge` describes them."""

    answer: Literal["number", "json"]
    lowest: float
    highest: float
    max_tokens: int


class JudgeError(RuntimeError):
    """The judge gave no score; the episode that asked fails with this cause."""


class Judge:
    """Asks a model for a number from `lowest` to `highest`.

        judge = Judge("http://127.0.0.1:9000/v1", "judge", prompt="From 0 to 10: {reply}")
        score = await judge.score({"reply": reply})

    Without `base_url` the run's own servers judge: `judge.score(fields, endpoint)`, with the
    endpoint of an agent's episode; see `Endpoint.judge`.

    One instance serves all episodes of a worker: make it in `__init__`. At most `max_open` calls
    are open at one time. The openai package repeats a call up to `max_retries` times after 408,
    409, 429, 5xx, a broken connection or `timeout_s`, later each time, or when `retry-after` says.
    """

    def __init__(
        self,
        base_url: str = "",
        model: str = "any",
        *,
        prompt: str,
        api_key: str = "none",
        answer: Literal["number", "json"] = "number",
        lowest: float = 0.0,
        highest: float = 10.0,
        max_tokens: int = 1024,
        **limits: Unpack[CallLimits],
    ) -> None:
        """In `prompt` the text {NAME} stands for the field NAME that `score` is given.

        With `answer` "number" the score is the one number on the last line of the judge's reply
        that is not empty; "7/10" are two. With "json" it is the field `score` of the object from
        the reply's first { to its last }. Raises ConfigError for arguments that cannot work.
        """
        check_choice("answer", answer, ("number", "json"))
        if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
            raise ConfigError(f"lowest must be below highest, got {lowest} and {highest}")
        if FIELD.search(prompt) is None:
            raise ConfigError(f"prompt must name a field, such as {{reply}}, got {prompt!r}")
        self._server = JudgeServer(
            f"the judge {model} at {base_url}" if base_url else "the judge",
            base_url or NOWHERE,
            api_key=api_key,
            **limits,
        )
        self._is_anywhere = bool(base_url)
        self._name = self._server.name
        self._model, self._prompt, self._answer = model, prompt, answer
        self._lowest, self._highest = lowest, highest
        self._max_tokens = max_tokens

    async def score(self, fields: Mapping[str, str], endpoint: Endpoint | None = None) -> float:
        """Returns the judge's number. Raises JudgeError, which names why there is none.

        With the `endpoint` of an episode the model as the run started judges.
        """
        if endpoint is None and not self._is_anywhere:
            raise JudgeError("a judge without base_url needs the endpoint of an agent's episode")
        text = FIELD.sub(lambda found: fields.get(found[1], found[0]), self._prompt)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
        }
        answer = await self._server.ask("/chat/completions", body, _Completion, endpoint)
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            raise JudgeError(
                f"{self._name} was cut off at {self._max_tokens} tokens: raise max_tokens"
            )
        return self._read(choice.message.content or "")

    def share(self, score: float) -> float:
        """Returns where a score lies between `lowest` and `highest`, from 0 to 1."""
        return (score - self._lowest) / (self._highest - self._lowest)

    def _read(self, text: str) -> float:
        score = _only_number(text) if self._answer == "number" else _field_score(text)
        if score is None:
            is_json = self._answer == "json"
            wanted = (
                "an object with the number `score`" if is_json else "one number on its last line"
            )
            raise JudgeError(f"{self._name} must reply with {wanted}, got {in_one_line(text)!r}")
        if not self._lowest <= score <= self._highest:
            raise JudgeError(
                f"{self._name} must score from {self._lowest:g} to {self._highest:g}, got {score:g}"
            )
        return score


class JudgeServer:
    """A server of scores, whose failures are JudgeError with its name."""

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: str,
        max_open: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        """Raises ConfigError for arguments that cannot work."""
        check_at_least("max_open", max_open, 1)
        check_at_least("max_retries", max_retries, 0)
        check_above_0("timeout_s", timeout_s)
        self.name = name
        self._open = asyncio.Semaphore(max_open)
        self._client = openai_client(
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            max_retries=max_retries,
            most_bytes=MAX_ANSWER_BYTES,
        )

    async def ask(
        self,
        url: str,
        body: Mapping[str, object],
        form: type[Answer],
        endpoint: Endpoint | None = None,
    ) -> Answer:
        """Returns the answer of the server, or of the judge of an episode's `endpoint`."""
        client = self._client
        if endpoint is not None:
            judge = endpoint.judge()
            client = client.with_options(base_url=judge.base_url, api_key=judge.api_key)
        async with self._open:
            with faults_as(JudgeError, self.name):
                answer = await client.post(url, body=body, cast_to=object)
        try:
            return form.model_validate(answer)
        except ValidationError as error:
            raise JudgeError(
                f"{self.name} must answer as {form.kind}, got {in_one_line(str(answer))!r}"
            ) from error


def _only_number(text: str) -> float | None:
    lines = [line for line in text.splitlines() if line.strip()]
    found = NUMBER.findall(lines[-1]) if lines else []
    return float(found[0]) if len(found) == 1 else None


def _field_score(text: str) -> float | None:
    try:
        said = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None
    score = said.get("score")
    # True is an int of Python's.
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    return float(score) if is_number else None
