"""Questions from a file, whose replies another model scores by a rubric."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from slipstream.client.builtin.question_files import Row, read_rows
from slipstream.client.environment import Environment, Message, StepResult
from slipstream.client.judge import Judge
from slipstream.protocol.errors import ConfigError


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
        if "{question}" not in instruction:
            raise ConfigError(f"instruction must contain {{question}}, got {instruction!r}")
        self._judge = Judge(
            base_url,
            model,
            prompt=rubric,
            api_key=_key_in(api_key_file),
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
        return [Message("user", self._instruction.replace("{question}", task[self._question]))]

    async def step(self, reply: str) -> StepResult:
        """Asks the judge."""
        fields = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in self._row.items()
        }
        score = await self._judge.score(fields | {"reply": reply})
        return StepResult(self._judge.share(score), metrics={"score": score})


def _key_in(path: str | None) -> str:
    if path is None:
        return "none"
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"api_key_file {path} is empty: put the judge's key into it")
    return key
