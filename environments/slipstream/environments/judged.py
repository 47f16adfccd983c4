"""Questions from a file, whose replies another model scores."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

from slipstream.client.agent import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.client.environment import Environment, Message, Reply, StepResult
from slipstream.core.errors import ConfigError
from slipstream.core.openai_client import key_in
from slipstream.environments.judge import NOWHERE, Judge
from slipstream.environments.question_files import Row, read_rows
from slipstream.environments.reward_model import RewardModel


class Judged(Environment[Row]):
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
        answer: Literal["number", "json"] = "number",
        lowest: float = 0.0,
        highest: float = 10.0,
        max_tokens: int = 1024,
        max_open: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        """`base_url` and `model` name the judge, whose key is in `api_key_file`.

        `rubric` is what the judge reads: {reply} stands for the reply and {NAME} for the column
        NAME. `answer` and what follows it are as in `Judge`. ConfigError names what cannot work.
        """
        if "{reply}" not in rubric:
            raise ConfigError(f"rubric must contain {{reply}}, got {rubric!r}")
        _check_instruction(instruction)
        self._judge = Judge(
            base_url,
            model,
            prompt=rubric,
            api_key=key_in(api_key_file, "api_key_file"),
            answer=answer,
            lowest=lowest,
            highest=highest,
            max_tokens=max_tokens,
            max_open=max_open,
            timeout_s=timeout_s,
            max_retries=max_retries,
        )
        self._instruction = instruction
        self._question = question
        self._rows = _questions(path, question)

    def tasks(self) -> list[Row]:
        """Returns the rows of the file."""
        return self._rows

    def reset(self, task: Row) -> list[Message]:
        """Asks the question."""
        self._row = task
        return [Message("user", self._instruction.replace("{question}", task[self._question]))]

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


class Rewarded(Environment[Row]):
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
        max_open: int = 16,
        timeout_s: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        """`base_url` and `model` name the reward model, whose key is in `api_key_file`.

        `label` and what follows it are as in `RewardModel`. ConfigError names what cannot work.
        """
        _check_instruction(instruction)
        self._model = RewardModel(
            base_url,
            model,
            label=label,
            as_probability=as_probability,
            api_key=key_in(api_key_file, "api_key_file"),
            max_open=max_open,
            timeout_s=timeout_s,
            max_retries=max_retries,
        )
        self._instruction, self._question = instruction, question
        self._rows = _questions(path, question)

    def tasks(self) -> list[Row]:
        """Returns the rows of the file."""
        return self._rows

    def reset(self, task: Row) -> list[Message]:
        """Asks the question."""
        text = self._instruction.replace("{question}", task[self._question])
        self._asked = {"role": "user", "content": text}
        return [Message(**self._asked)]

    async def step(self, reply: str) -> StepResult:
        """Asks the reward model about the question and the reply without its reasoning."""
        said = reply.content if isinstance(reply, Reply) else reply
        score = await self._model.score([self._asked, {"role": "assistant", "content": said}])
        return StepResult(score)


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


def _check_instruction(instruction: str) -> None:
    if "{question}" not in instruction:
        raise ConfigError(f"instruction must contain {{question}}, got {instruction!r}")


def _questions(path: str, question: str) -> list[Row]:
    """Returns the rows of a file; ConfigError for one without a text in the column `question`."""
    rows = list(read_rows(Path(path)))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get(question), str):
            raise ConfigError(
                f"{path}, row {number}: column {question!r} must hold a text; the columns are "
                f"{', '.join(map(repr, row))}"
            )
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows
