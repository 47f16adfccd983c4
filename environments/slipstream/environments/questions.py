"""Questions with one right answer, from a file or from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import random
from pathlib import Path
from typing import Literal

from slipstream.client.environment import Environment, Message, StepResult
from slipstream.core.errors import ConfigError
from slipstream.environments.hub_data import PREFIX, HubData
from slipstream.environments.math_judge import MathJudge
from slipstream.environments.question_files import Question, read_questions

JUDGES = ("math_verify", "exact", "contains")
SPLITS = ("all", "train", "heldout")
DUPLICATES = ("refuse", "drop")


class Questions(Environment[Question]):
    """Asks the questions of a parquet or JSON-lines file, or of a data set on the hub.

    Each gets one reply, with reward 1 or 0.

    `judge`: "math_verify" compares as mathematics: 1/2 is 0.5, and the last or boxed expression of
    the reply counts. "exact" compares as text; "contains" looks for the answer in the reply. With
    `split` "train" and "heldout" one in `heldout_one_in` questions is held out, by a hash of its
    text: no seed and no other order brings it into training.
    """

    def __init__(
        self,
        path: str,
        *,
        question: str = "question",
        answer: str = "answer",
        judge: Literal["math_verify", "exact", "contains"] = "math_verify",
        system: str | None = None,
        instruction: str = "{question}",
        answer_after: str | None = None,
        split: Literal["all", "train", "heldout"] = "all",
        heldout_one_in: int = 10,
        shuffle_seed: int | None = None,
        limit: int | None = None,
        duplicates: Literal["refuse", "drop"] = "refuse",
        judge_timeout_s: float = 10.0,
        hub_config: str | None = None,
        hub_split: str = "train",
        hub_revision: str | None = None,
    ) -> None:
        """`path` is a file, or "hf:OWNER/NAME" with the `hub_` arguments.

        `question` and `answer` are columns; a dot leads into a column of objects.

        `instruction` is put around a question that is a text. Where the text `answer_after` occurs
        in an answer or a reply, only what follows its last occurrence counts. `limit` takes the
        first questions of the split, after shuffling. ConfigError names what cannot work.
        """
        _check("judge", judge, JUDGES)
        _check("split", split, SPLITS)
        _check("duplicates", duplicates, DUPLICATES)
        if "{question}" not in instruction:
            raise ConfigError(f"instruction must contain {{question}}, got {instruction!r}")
        if heldout_one_in < 2 or (limit is not None and limit < 1):
            raise ConfigError(
                f"heldout_one_in must be at least 2 and limit at least 1, "
                f"got {heldout_one_in} and {limit}"
            )
        if judge == "math_verify" and importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "judge 'math_verify' needs the package math-verify: "
                "pip install 'math-verify[antlr4_9_3]==0.9.0'"
            )
        self._judge = judge
        self._system = system
        self._instruction = instruction
        self._answer_after = answer_after
        self._math = MathJudge(timeout_s=judge_timeout_s)
        source = _source(path, hub_config, hub_split, hub_revision)
        questions = read_questions(source, question, answer, duplicates=duplicates)
        if split != "all":
            wanted = split == "heldout"
            questions = [q for q in questions if is_heldout(q, heldout_one_in) == wanted]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(questions)
        self._questions = questions[:limit]
        if not self._questions:
            raise ConfigError(f"{path} has no questions in split {split!r}")
        self._question = self._questions[0]

    def tasks(self) -> list[Question]:
        """Returns the questions of the split."""
        return self._questions

    def reset(self, task: Question) -> list[Message]:
        """Asks the question."""
        self._question = task
        *before, last = task.messages
        if not before:
            last = Message(last.role, self._instruction.replace("{question}", last.text))
        system = [] if self._system is None else [Message("system", self._system)]
        return [*system, *before, last]

    async def step(self, reply: str) -> StepResult:
        """Judges the reply as `judge` says."""
        answer, given = self._tail(self._question.answer), self._tail(reply)
        metrics: dict[str, float] = {}
        if self._judge == "math_verify":
            verdict = await self._math.compare(answer, given)
            right = verdict.right
            metrics = {"readable": verdict.readable, "judge_timeout": verdict.timed_out}
        elif self._judge == "exact":
            right = _plain(answer) == _plain(given)
        else:
            right = _plain(answer).casefold() in _plain(given).casefold()
        return StepResult(float(right), metrics={"right": right, **metrics})

    def _tail(self, text: str) -> str:
        return text if self._answer_after is None else text.rpartition(self._answer_after)[2]


def is_heldout(question: Question, one_in: int) -> bool:
    """Whether a question is held out, which its text alone decides."""
    text = "\0".join(f"{message.role}\0{message.content}" for message in question.messages)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0


def _source(path: str, config: str | None, split: str, revision: str | None) -> Path | HubData:
    if path.startswith(PREFIX):
        return HubData(path.removeprefix(PREFIX), config, split, revision)
    if config is not None or split != "train" or revision is not None:
        raise ConfigError(f"hub_config, hub_split and hub_revision are for hf: names, got {path!r}")
    return Path(path)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
