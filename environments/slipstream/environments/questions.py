"""Questions from files, memory or the Hugging Face hub, judged by an answer or by a function."""

import copy
import importlib
import importlib.util
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsFloat, cast

from pydantic import Field
from slipstream.client.environment import Message, Reply, StepResult, answer_of
from slipstream.client.environment_loader import describe, environment_failed
from slipstream.core.arguments import AboveZero, Count, checked
from slipstream.core.errors import ConfigError
from slipstream.core.hub import DATA_PREFIX
from slipstream.environments.answers import bare, contains, number_of, other_money
from slipstream.environments.arguments import is_heldout
from slipstream.environments.math_judge.comparisons import MathJudge
from slipstream.environments.question_files import (
    Asked,
    Columns,
    Question,
    Row,
    files_of,
    hub_rows,
    named_rows,
    numbered,
)

JUDGES = ("math_verify", "exact", "contains")
# Arguments that a user's function may take.
ARGUMENTS = ("reply", "question", "answer", "row")


class Questions(Asked):
    """Asks the questions of parquet or JSON-lines files, of rows, or of a data set on the hub.

    Each question gets one reply. A subclass with a `step` of its own can read the question, its
    answer and its row from `self.question`.

    `judge` "math_verify" compares as mathematics: 1/2 equals 0.5, and the last or boxed expression
    of the reply counts. "exact" compares as text; "contains" looks for the answer in the reply.
    These three give reward 1 or 0. "module:function" names a function, plain or async, that takes
    `reply` and any of `question`, `answer` and `row` by these names; it returns the reward, or a
    mapping of metrics with the reward under "reward". In Python `judge` may be the function itself.

    A hash of the text holds out one in `heldout_one_in` questions, whatever seed and order are.
    `split` "heldout" takes the held-out questions, "train" all others, and "all" both.
    """

    @checked
    def __init__(
        self,
        path: str | Path | Iterable[str] | Iterable[Row],
        *,
        question: str = "question",
        answer: str | None = "answer",
        judge: str | Callable[..., object] = "math_verify",
        system: str | None = None,
        instruction: str = "{question}",
        answer_after: str | None = None,
        split: Literal["all", "train", "heldout"] = "all",
        heldout_one_in: Annotated[int, Field(ge=2)] = 10,
        shuffle_seed: int | None = None,
        limit: Count | None = None,
        duplicates: Literal["refuse", "drop"] = "refuse",
        judge_timeout_s: AboveZero = 10.0,
        hub_config: str | None = None,
        hub_split: str = "train",
        hub_revision: str | None = None,
    ) -> None:
        """`path` is a file, a pattern such as "data/*.jsonl", a list of these, or "hf:OWNER/NAME".

        The `hub_` arguments are for the last one. In Python it may be the rows, as a list of dicts
        or whatever else gives dicts.

        `question` and `answer` are columns; "a.b" is the field b of the objects in column a. The
        column `answer` is not read for a function that does not take the answer.

        `instruction` is the prompt of a question that is a text, with this text in place of
        `{question}`; `system` is refused before messages that have one. If the text `answer_after`
        occurs in an answer or a reply, only the text after its last occurrence counts. `limit`
        keeps only the first questions of the split, after shuffling. Raises ConfigError for wrong
        arguments.
        """
        is_named = isinstance(judge, str) and ":" not in judge
        self._function = None if is_named else JudgeFunction(judge)
        if is_named:
            _check_judge(judge)
        self._judge = judge
        self._answer_after = answer_after
        self._math = MathJudge(timeout_s=judge_timeout_s)
        takes_answer = self._function is None or self._function.takes_answer
        columns = Columns(
            question,
            answer if takes_answer else None,
            answer_after,
            takes_any=self._function is not None,
            system=system,
            instruction=instruction,
            duplicates=duplicates,
        )
        super().__init__(_rows_of(path, hub_config, hub_split, hub_revision), columns)
        if split != "all":
            self._questions = [
                candidate
                for candidate in self._questions
                if is_heldout(candidate.identity, heldout_one_in) == (split == "heldout")
            ]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._questions)
        if not self._questions:
            raise ConfigError(f"{path} has no questions in split {split!r}")
        self._questions = self._questions[:limit]

    def reset(self, task: Question) -> list[Message]:
        if self._function is None or self._function.names_answer:
            right = task.answer
            several = task.value
            if isinstance(several, list) and isinstance(several[0], str | int | float):
                # Any of them is right.
                right = str(several[0])
            right = "" if isinstance(several, Mapping) else right
            is_marked = right and self._answer_after
            self.right_reply = f"{self._answer_after} {right}" if is_marked else right
        return super().reset(task)

    async def step(self, reply: str) -> StepResult:
        """Judges the reply by the argument `judge`, and returns the reward."""
        reply_answer = answer_of(reply)
        answer = self.question.answer
        if self._answer_after:
            reply_answer = reply_answer.rpartition(self._answer_after)[2]
        if self._function is not None:
            if self._answer_after:
                full_reply = reply if isinstance(reply, Reply) else Reply(reply)
                reply = Reply(reply_answer, content=reply_answer, token_ids=full_reply.token_ids)
                reply.reasoning = full_reply.reasoning
                reply.tool_calls = full_reply.tool_calls
            return await self._function.judge(self.question, reply)
        if self._judge == "math_verify":
            comparison = await self._math.compare(answer, reply_answer, self.question.text)
            return StepResult(float(comparison["right"]), metrics=comparison)
        if self._judge == "exact":
            right = bare(answer) == bare(reply_answer) and not other_money(reply_answer, answer)
            if isinstance(value := self.question.value, int | float | Decimal):
                value = float(value) if isinstance(value, Decimal) else value
                right = right or number_of(bare(reply_answer)) == value
        else:
            right = contains(reply_answer, answer)
        return StepResult(float(right), metrics={"right": right})


def _check_judge(judge: object) -> None:
    """Raises ConfigError for a name that no judge has, or one that needs a missing package."""
    if judge not in JUDGES:
        allowed = ", ".join(JUDGES)
        raise ConfigError(f"judge must be one of {allowed}, module:function, got {judge!r}")
    if judge == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "judge 'math_verify' needs the package math-verify: "
            "pip install 'math-verify[antlr4_9_3]==0.9.0'"
        )


def _rows_of(
    path: str | Path | Iterable[str] | Iterable[Row],
    hub_config: str | None,
    hub_split: str,
    hub_revision: str | None,
) -> Iterable[tuple[str, Row]]:
    """Returns the rows that `path` names or holds, with the place of each."""
    if isinstance(path, str) and path.startswith(DATA_PREFIX):
        return hub_rows(path.removeprefix(DATA_PREFIX), hub_config, hub_split, hub_revision)
    is_file = isinstance(path, str | Path)
    entries = tuple[object, ...](path if isinstance(path, Iterable) and not is_file else (path,))
    if (hub_config, hub_split, hub_revision) != (None, "train", None):
        raise ConfigError(f"hub_config, hub_split and hub_revision are for hf: names, got {path!r}")
    if entries and all(isinstance(entry, Mapping) for entry in entries):
        return numbered("the given rows", cast(Iterable[Row], entries))
    if not is_file and not isinstance(path, list | tuple):
        raise ConfigError(
            f"rows are a list of dicts, got a {type(path).__name__} of {entries[:1]!r:.80}; "
            'columns become rows by to_dict("records") of a DataFrame'
        )
    return itertools.chain.from_iterable(map(named_rows, files_of(entries)))


class JudgeFunction:
    """A user's function that judges replies."""

    def __init__(self, judge: str | Callable[..., object]) -> None:
        """Takes the function, or imports the one that is named as "module:function".

        Raises ConfigError if there is no such function, or it requires an argument not in
        `ARGUMENTS`.
        """
        self._reference = getattr(judge, "__qualname__", repr(judge))
        call: Any = judge
        if isinstance(judge, str):
            self._reference = judge
            module, _, name = judge.partition(":")
            if not (module and name):
                raise ConfigError(f"judge must be module:function, got {judge!r}")
            try:
                call = getattr(importlib.import_module(module), name, "")
            except ModuleNotFoundError as error:
                raise ConfigError(f"judge: there is no module {error.name!r}") from error
            if not callable(call):
                raise ConfigError(f"judge: module {module} has no function {name!r}")
        self._call: Callable[..., object] = call
        self._taken: list[str] = []
        parameters = inspect.signature(call).parameters
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._taken += [argument for argument in ARGUMENTS if argument not in self._taken]
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif name in ARGUMENTS and parameter.kind is not parameter.POSITIONAL_ONLY:
                self._taken.append(name)
            elif parameter.default is parameter.empty:
                raise ConfigError(
                    f"judge {self._reference} must take {', '.join(ARGUMENTS)} by name, or some of "
                    f"them, and takes {name!r}: wrap it in a function that does"
                )
        if "reply" not in self._taken:
            raise ConfigError(f"judge {self._reference} must take the argument reply")
        self.takes_answer = "answer" in self._taken
        # Whether it takes the answer by a parameter of this name.
        self.names_answer = "answer" in parameters

    async def judge(self, question: Question, reply: str) -> StepResult:
        """Returns the function's reward and metrics. Raises EnvironmentFailed without a reward."""
        arguments: dict[str, object] = {"reply": reply, "question": question.text}
        # A function that changes its arguments changes them for this reply alone.
        for name, value in (("answer", question.value), ("row", question.row)):
            try:
                arguments[name] = copy.deepcopy(value) if name in self._taken else None
            except Exception as error:
                raise environment_failed(
                    f"judge {self._reference} gets a copy of the {name}, and that of "
                    f"{question.text!r:.60} has none: {describe(error)}; keep what is no data "
                    "outside the rows"
                ) from error
        result: object = self._call(**{name: arguments[name] for name in self._taken})
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, SupportsFloat):
            return StepResult(cast(float, result))
        if not isinstance(result, Mapping) or "reward" not in result:
            raise environment_failed(
                f"judge {self._reference} must return a number, or metrics with 'reward', "
                f"got {result!r}"
            )
        metrics = dict(result)
        reward = metrics.pop("reward")
        by_token = metrics.pop("token_rewards", ())
        return StepResult(reward, metrics=metrics, token_rewards=by_token)
