"""Judges and reward models: models behind an endpoint that score replies.

`Judge` and `RewardModel` are for your own environments; `Judged` and `Rewarded` ask the questions
of a file. A call ends with the endpoint's answer, or with an error `timeout_s`
after its last retry began.
"""

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from slipstream.client.environment import Message, StepResult, answer_of
from slipstream.core.arguments import AboveZero, Count, NotNegative, checked
from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import faults_as, in_one_line, key_in, openai_client
from slipstream.core.template_values import json_object
from slipstream.environments import arguments
from slipstream.environments.answers import numbers
from slipstream.environments.question_files import Asked, Columns, named_rows

# The forms of a judge's reply, in words.
ANSWERS = {"number": "one number on its last line", "json": "an object with the number `score`"}
# The names of the limit of tokens, of which OpenAI's models that reason take the first alone.
LIMITS = ("max_completion_tokens", "max_tokens")
# No score needs a longer answer.
MAX_ANSWER_BYTES = 4 << 20


class CallLimits(TypedDict, total=False):
    """Limits of calls to a scoring server; by default 16 open calls, 60 s each, 5 retries."""

    max_open: Count
    timeout_s: AboveZero
    max_retries: NotNegative


class JudgeError(RuntimeError):
    """The judge gave no score; the episode that asked fails with this cause."""


class _ScoringServer:
    """A client of a scoring server, whose failures name the server."""

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
        self._name = name
        self._open = asyncio.Semaphore(max_open)
        self._client = openai_client(
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            max_retries=max_retries,
            most_bytes=MAX_ANSWER_BYTES,
        )

    async def _ask(self, url: str, body: Mapping[str, object]) -> object:
        async with self._open:
            with faults_as(JudgeError, self._name):
                return await self._client.post(url, body=body, cast_to=object)

    def _malformed(self, answer: object, kind: str) -> JudgeError:
        got = in_one_line(str(answer))
        return JudgeError(f"{self._name} must answer as {kind}, got {got!r}")


class Judge(_ScoringServer):
    """Asks a model for a number from `lowest` to `highest`.

        judge = Judge("http://127.0.0.1:9000/v1", "judge", prompt="From 0 to 10: {reply}")
        score = await judge.score({"reply": reply})

    One instance serves all episodes of a worker: make it in `__init__`. At most `max_open` calls
    are open at one time. The openai package repeats a call up to `max_retries` times after 408,
    409, 429, 5xx, a broken connection, an answer that is no JSON or `timeout_s`, with growing
    pauses or by `retry-after`.
    """

    @checked
    def __init__(
        self,
        base_url: str,
        model: str = "any",
        *,
        prompt: str,
        api_key: str = "none",
        answer: Literal["number", "json"] = "number",
        lowest: float = 0.0,
        highest: float = 10.0,
        max_tokens: Count = 1024,
        request: Mapping[str, Any] = {},
        **limits: Unpack[CallLimits],
    ) -> None:
        """`prompt` is the text for the judge; {NAME} in it stands for `fields["NAME"]`.

        With `answer` "number" the score is the only number on the last line of the judge's reply
        that is not empty; "7/10" has two, which is an error. With "json" it is the field `score` of
        the object from the reply's first { to its last }. `request` has more fields of the request,
        or others: without them it has `max_tokens`, whose place `max_completion_tokens` takes, and
        the temperature 0; None leaves a field out. Raises ConfigError for arguments that cannot
        work.
        """
        if owned_fields := {"model", "messages", "stream"} & request.keys():
            raise ConfigError(
                f"request must be without {min(owned_fields)!r}, which the judge sets itself"
            )
        request_fields = json.loads(json_object("request", request, allow_nan=False))
        limit = {} if request_fields.get(LIMITS[0]) else {LIMITS[1]: max_tokens}
        fields = {"temperature": 0.0, **limit, **request_fields}
        self._request = {name: value for name, value in fields.items() if value is not None}
        if not lowest < highest:
            raise ConfigError(f"lowest must be below highest, got {lowest} and {highest}")
        if arguments.FIELD.search(prompt) is None:
            raise ConfigError(f"prompt must name a field, such as {{reply}}, got {prompt!r}")
        name = f"the judge {model} at {base_url}"
        super().__init__(name, base_url, api_key=api_key, **limits)
        self._model = model
        self._prompt = prompt
        self._answer = answer
        self.lowest = lowest
        self._highest = highest

    @checked
    async def score(self, fields: Mapping[str, object]) -> float:
        """Returns the judge's score. Raises JudgeError with the reason if there is none.

        `fields` fill the prompt, as JSON unless they are texts.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": arguments.filled(self._prompt, fields)}],
            **self._request,
        }
        answer = await self._ask("/chat/completions", body)
        match answer:
            case {"choices": [{"message": {**message}} as choice, *_]}:
                # Some servers leave it out where a model has only thought.
                content = "" if message.get("content") is None else message["content"]
            case _:
                content = None
        if not isinstance(content, str):
            raise self._malformed(answer, "OpenAI's chat completions do")
        if choice.get("finish_reason") == "length":
            limits = [f"{most} tokens: raise {n}" for n in LIMITS if (most := self._request.get(n))]
            raise JudgeError(f"{self._name} was cut off at {(limits or ['its own limit'])[0]}")
        text = answer_of(content)
        score: object = None
        if self._answer == "number":
            lines = [line for line in text.splitlines() if line.strip()]
            last_numbers = numbers(lines[-1]) if lines else []
            score = float(last_numbers[0]) if len(last_numbers) == 1 else None
        else:
            with contextlib.suppress(ValueError, RecursionError):
                score = json.loads(text[text.index("{") : text.rindex("}") + 1]).get("score")
        # In Python, True is an int.
        if not isinstance(score, int | float) or isinstance(score, bool):
            form = ANSWERS[self._answer]
            raise JudgeError(f"{self._name} must reply with {form}, got {in_one_line(text)!r}")
        if not self.lowest <= score <= self._highest:
            # `score` may be a whole number that no float holds.
            got = f"{score:g}" if isinstance(score, float) else in_one_line(str(score))
            raise JudgeError(
                f"{self._name} must score from {self.lowest:g} to {self._highest:g}, got {got}"
            )
        return float(score)

    @checked
    def share(self, score: float) -> float:
        """Returns a score scaled so that `lowest` is 0 and `highest` is 1."""
        return (score - self.lowest) / (self._highest - self.lowest)


class Judged(Asked):
    """Asks the questions of a .jsonl or .parquet file; the reward is the judge's score, 0 to 1."""

    @checked
    def __init__(
        self,
        path: str | Path,
        base_url: str,
        model: str,
        rubric: str,
        *,
        question: str = "question",
        instruction: str = "{question}",
        api_key_file: str | Path | None = None,
        **options: Any,  # noqa: ANN401 - those of `Judge`, which checks them
    ) -> None:
        """`base_url` and `model` name the judge, whose key is in `api_key_file`.

        `rubric` is the text for the judge: {reply} stands for the reply and {NAME} for the column
        NAME. `options` are further arguments of `Judge`. Raises ConfigError, which names the
        argument that cannot work.
        """
        arguments.check_holds("rubric", rubric, "{reply}")
        columns = Columns(question, instruction=instruction, duplicates="keep")
        super().__init__(named_rows(Path(path)), columns)
        arguments.check_filled(
            "rubric", [rubric], [{"reply": "", **entry.row} for entry in self._questions]
        )
        self._judge = Judge(
            base_url, model, prompt=rubric, api_key=key_in(api_key_file, "api_key_file"), **options
        )

    async def step(self, reply: str) -> StepResult:
        """Returns the judge's score of `reply` as the reward.

        An empty reply has the lowest score, without a question to the judge.
        """
        answer = answer_of(reply).strip()
        score = self._judge.lowest
        if answer:
            score = await self._judge.score({**self.question.row, "reply": answer})
        return StepResult(self._judge.share(score), metrics={"score": score})


class Rewarded(Asked):
    """Asks the questions of a .jsonl or .parquet file; the reward is a reward model's score."""

    @checked
    def __init__(
        self,
        path: str | Path,
        base_url: str,
        model: str,
        *,
        question: str = "question",
        instruction: str = "{question}",
        api_key_file: str | Path | None = None,
        **options: Any,  # noqa: ANN401 - those of `RewardModel`, which checks them
    ) -> None:
        """`base_url` and `model` name the reward model, whose key is in `api_key_file`.

        `question` is the column of questions, each of which replaces {question} in `instruction`.
        `options` are further arguments of `RewardModel`. Raises ConfigError, which names the
        argument that cannot work.
        """
        columns = Columns(question, instruction=instruction, duplicates="keep")
        super().__init__(named_rows(Path(path)), columns)
        key = key_in(api_key_file, "api_key_file")
        self._model = RewardModel(base_url, model, api_key=key, **options)

    async def step(self, reply: str) -> StepResult:
        """Returns the model's score of the reply, without its reasoning, as the reward."""
        talk = [*self._asked, Message("assistant", answer_of(reply))]
        return StepResult(await self._model.score([message.fields() for message in talk]))


class RewardModel(_ScoringServer):
    """Scores a conversation with a sequence classification model on a server.

        model = RewardModel("http://127.0.0.1:9000/v1", "reward")
        score = await model.score([{"role": "user", ...}, {"role": "assistant", ...}])

    The server applies the model's chat template. One instance serves all episodes of a worker. At
    most `max_open` calls are open at one time; failed calls are repeated as in `Judge`.
    """

    @checked
    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        label: NotNegative = 0,
        as_probability: bool = False,
        api_key: str = "none",
        **limits: Unpack[CallLimits],
    ) -> None:
        """The score is output number `label` of the model's head.

        It is the raw output, or a probability if `as_probability`. Raises ConfigError for arguments
        that cannot work.
        """
        name = f"the reward model {model} at {base_url}"
        super().__init__(name, base_url, api_key=api_key, **limits)
        # vLLM serves this path next to /v1, not below it.
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/classify"
        self._model = model
        self._label = label
        self._as_probability = as_probability

    @checked
    async def score(self, messages: Sequence[Mapping[str, Any]]) -> float:
        """Returns the model's score of a conversation. Raises JudgeError if there is none."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "use_activation": self._as_probability,
        }
        answer = await self._ask(self._url, body)
        match answer:
            case {"data": [{"probs": list(outputs)}]} if {*map(type, outputs)} <= {int, float}:
                pass
            case _:
                raise self._malformed(answer, "vLLM's /classify does")
        if self._label >= len(outputs):
            raise JudgeError(f"{self._name} has {len(outputs)} outputs, no number {self._label}")
        score = float(outputs[self._label])
        if not math.isfinite(score):
            raise JudgeError(f"{self._name} must give a finite number, got {score}")
        return score
