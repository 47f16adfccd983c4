"""Questions from a file, whose replies another model scores: a judge, or a reward model.

Waits for: the model's endpoint. Unblocked by: its answer, or `timeout_s` after the last retry
began.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from pydantic import BaseModel, Field
from slipstream.client.agent import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.client.environment import Environment, Message, Reply, StepResult
from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import key_in
from slipstream.environments.arguments import check_at_least, check_holds
from slipstream.environments.judge import (
    NOWHERE,
    CallLimits,
    Form,
    Judge,
    JudgeError,
    JudgeOptions,
    JudgeServer,
)
from slipstream.environments.question_files import Row, read_rows


class _Questions(Environment[Row]):
    """Asks the questions of a .jsonl or .parquet file."""

    def __init__(self, path: str, question: str, instruction: str) -> None:
        """Takes the questions of the column `question`, each put into `instruction`."""
        check_holds("instruction", instruction, "{question}")
        self._instruction, self._question = instruction, question
        self._rows = list(read_rows(Path(path)))
        for number, row in enumerate(self._rows, start=1):
            if not isinstance(row.get(question), str):
                raise ConfigError(
                    f"{path}, row {number}: column {question!r} must hold a text; the columns are "
                    f"{', '.join(map(repr, row))}"
                )
        if not self._rows:
            raise ConfigError(f"{path} has no rows")

    def tasks(self) -> list[Row]:
        """Returns the rows of the file."""
        return self._rows

    def reset(self, task: Row) -> list[Message]:
        """Asks the question."""
        self._row = task
        self._asked = self._instruction.replace("{question}", task[self._question])
        return [Message("user", self._asked)]


class Judged(_Questions):
    """Asks the questions of a .jsonl or .parquet file; the reward is the judge's score, 0 to 1."""

    def __init__(
        self,
        path: str,
        base_url: str,
        model: str,
        rubric: str,
        *,
        question: str = "question",
        instruction: str = "{question}",
        api_key_file: str | None = None,
        **options: Unpack[JudgeOptions],
    ) -> None:
        """`base_url` and `model` name the judge, whose key is in `api_key_file`.

        `rubric` is what the judge reads: {reply} stands for the reply and {NAME} for the column
        NAME. `options` are those of `Judge`. Raises ConfigError, which names what
        cannot work.
        """
        check_holds("rubric", rubric, "{reply}")
        super().__init__(path, question, instruction)
        self._judge = Judge(
            base_url,
            model,
            prompt=rubric,
            api_key=key_in(api_key_file, "api_key_file"),
            **options,
        )

    async def step(self, reply: str) -> StepResult:
        """Asks the judge."""
        return await self.judged(reply)

    async def judged(self, reply: str, endpoint: Endpoint | None = None) -> StepResult:
        """Returns what the judge says of `reply`; `endpoint` is as in `Judge.score`."""
        fields = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in self._row.items()
        }
        score = await self._judge.score(fields | {"reply": reply}, endpoint)
        return StepResult(self._judge.share(score), metrics={"score": score})


class Rewarded(_Questions):
    """Asks the questions of a .jsonl or .parquet file; the reward is a reward model's score."""

    def __init__(
        self,
        path: str,
        base_url: str,
        model: str,
        *,
        question: str = "question",
        instruction: str = "{question}",
        api_key_file: str | None = None,
        label: int = 0,
        as_probability: bool = False,
        **limits: Unpack[CallLimits],
    ) -> None:
        """`base_url` and `model` name the reward model, whose key is in `api_key_file`.

        The rest are the arguments of `RewardModel`. Raises ConfigError, which names what
        cannot work.
        """
        super().__init__(path, question, instruction)
        self._model = RewardModel(
            base_url,
            model,
            label=label,
            as_probability=as_probability,
            api_key=key_in(api_key_file, "api_key_file"),
            **limits,
        )

    async def step(self, reply: str) -> StepResult:
        """Asks the reward model about the question and the reply without its reasoning."""
        said = reply.content if isinstance(reply, Reply) else reply
        asked = {"role": "user", "content": self._asked}
        return StepResult(await self._model.score([asked, {"role": "assistant", "content": said}]))


class JudgedByStart(AgentEnvironment[Row]):
    """Asks and scores as `Judged` does; the judge is the model as the run started.

    The run's own servers keep it beside the adapters, with `lora.publish = "adapters"`.
    """

    asks_start = True

    def __init__(self, path: str, rubric: str, **options: Any) -> None:  # noqa: ANN401
        """`options` are the arguments of `Judged`, without the judge's address, name and key."""
        for name in ("base_url", "model", "api_key_file"):
            if name in options:
                raise ConfigError(f"{name} must be left out: the run's own servers judge")
        self._judged = Judged(path, "", "any", rubric, **options)
        # The judge has said so if the package is missing.
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url=NOWHERE, api_key="none")

    def tasks(self) -> list[Row]:
        """Returns the rows of the file."""
        return self._judged.tasks()

    async def run(self, task: Row, endpoint: Endpoint) -> AgentOutcome:
        """Asks the model the question, and the judge about its reply."""
        asking = copy.copy(self._judged)
        asked: list[Any] = [dataclasses.asdict(message) for message in asking.reset(task)]
        client = self._client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
        answer = await client.chat.completions.create(model="any", messages=asked)
        result = await asking.judged(answer.choices[0].message.content or "", endpoint)
        return AgentOutcome(result.reward, metrics=result.metrics)


class _Class(BaseModel, strict=True):
    probs: list[float]


class _Classes(Form):
    kind = "vLLM's /classify does"
    data: list[_Class] = Field(min_length=1, max_length=1)


class RewardModel:
    """Asks a model for sequence classification for the score of a conversation.

        model = RewardModel("http://127.0.0.1:9000/v1", "reward")
        score = await model.score([{"role": "user", ...}, {"role": "assistant", ...}])

    The server applies the model's chat template. One instance serves all episodes of a worker. At
    most `max_open` calls are open at one time; each is repeated as those of `Judge` are.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        label: int = 0,
        as_probability: bool = False,
        api_key: str = "none",
        **limits: Unpack[CallLimits],
    ) -> None:
        """The score is the output number `label` of the model's head, as a probability or raw.

        Raises ConfigError for arguments that cannot work.
        """
        check_at_least("label", label, 0)
        self._server = JudgeServer(
            f"the reward model {model} at {base_url}", base_url, api_key=api_key, **limits
        )
        # vLLM has this call beside /v1, not below it.
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/classify"
        self._name = self._server.name
        self._model, self._label, self._as_probability = model, label, as_probability

    async def score(self, messages: Sequence[Mapping[str, str]]) -> float:
        """Returns the model's score of a conversation.

        Raises JudgeError, which names why there is none.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "use_activation": self._as_probability,
        }
        outputs = (await self._server.ask(self._url, body, _Classes)).data[0].probs
        if self._label >= len(outputs):
            raise JudgeError(f"{self._name} has {len(outputs)} outputs, no number {self._label}")
        score = outputs[self._label]
        if not math.isfinite(score):
            raise JudgeError(f"{self._name} must give a finite number, got {score}")
        return score
