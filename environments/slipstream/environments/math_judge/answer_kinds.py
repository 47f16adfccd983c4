"""The table of kinds: how a right answer is recognised, and what then reads the replies."""

from collections.abc import Callable
from typing import NamedTuple

from slipstream.environments.math_judge.choices import Choice
from slipstream.environments.math_judge.codes import Codes
from slipstream.environments.math_judge.dates import Date, Ratio, Time
from slipstream.environments.math_judge.expressions import Expression
from slipstream.environments.math_judge.formulas import has_words, plain_words
from slipstream.environments.math_judge.intervals import Bound, Intervals
from slipstream.environments.math_judge.lists import Several
from slipstream.environments.math_judge.number_answers import Number
from slipstream.environments.math_judge.phrases import gives_no_answer
from slipstream.environments.math_judge.quantities import Money, Quantity
from slipstream.environments.math_judge.statements import final_statement, readable
from slipstream.environments.math_judge.verdict import RightAnswer
from slipstream.environments.math_judge.words import Nothing, Reaction, Text, Truth, Word

# Bounds of what is read of a reply: so many phrases from its end, and of each the end.
MAX_PHRASES = 40
MAX_PHRASE_CHARACTERS = 600


class Case(NamedTuple):
    """A right answer as `readable` has it and as it was written, its question, and the reply."""

    text: str
    question: str = ""
    written: str = ""
    reply: str = ""


class AnswerKind(NamedTuple):
    """A kind of right answers: `read` returns the answer of this kind in a case, or None."""

    name: str
    read: Callable[[Case], RightAnswer | None]


def _expression(case: Case) -> RightAnswer | None:
    return None if has_words(plain_words(case.text)) else Expression(case.text)


# The first kind that recognises an answer is its kind.
KINDS = (
    AnswerKind(
        name="choice",
        read=lambda case: Choice.read(case.text, case.question, right_answer),
    ),
    AnswerKind(
        name="yes or no",
        read=lambda case: Truth.read(case.text),
    ),
    AnswerKind(
        name="nothing",
        read=lambda case: Nothing.read(case.text),
    ),
    AnswerKind(
        name="date",
        read=lambda case: Date.read(case.text),
    ),
    AnswerKind(
        name="time",
        read=lambda case: Time.read(case.text, case.question),
    ),
    AnswerKind(
        name="ratio",
        read=lambda case: Ratio.read(case.text, case.question),
    ),
    AnswerKind(
        name="money",
        read=lambda case: Money.read(case.written, case.question, case.reply),
    ),
    AnswerKind(
        name="number",
        read=lambda case: Number.read(case.text, case.question),
    ),
    AnswerKind(
        name="reaction",
        read=lambda case: Reaction.read(case.text),
    ),
    AnswerKind(
        name="bound",
        read=lambda case: Bound.read(case.text),
    ),
    AnswerKind(
        name="interval",
        read=lambda case: Intervals.read(case.text, case.question),
    ),
    AnswerKind(
        name="quantity",
        read=lambda case: Quantity.read(case.text, case.question),
    ),
    AnswerKind(
        name="list",
        read=lambda case: Several.read(case.text, case.question, right_answer),
    ),
    AnswerKind(
        name="codes",
        read=lambda case: Codes.read(case.text, case.question),
    ),
    AnswerKind(
        name="word",
        read=lambda case: Word.read(case.text),
    ),
    AnswerKind(
        name="expression",
        read=_expression,
    ),
    AnswerKind(
        name="text",
        read=lambda case: Text(case.text),
    ),
)


class AnswerVerdict(NamedTuple):
    """Whether a reply has an answer of the right answer's kind, and whether it is right."""

    readable: bool
    right: bool


def kind_of(answer: str, question: str = "") -> str:
    """Returns the name of the kind of a right answer."""
    return _read(Case(readable(answer), question, answer))[0]


def right_answer(text: str, question: str) -> RightAnswer:
    """Returns a right answer, which is a part of another one, as its kind reads it."""
    return _read(Case(text, question))[1]


def _read(case: Case) -> tuple[str, RightAnswer]:
    for kind in KINDS:
        right = kind.read(case)
        if right is not None:
            return kind.name, right
    raise AssertionError("every answer is a text")


def judge(answer: str, reply: str, question: str = "") -> AnswerVerdict:
    """Returns the verdict on a reply, whose thoughts are cut, to a question, "" if not known."""
    _, right = _read(Case(readable(answer), question, answer, reply))
    statement = final_statement(reply, keeps_factorial="!" in answer)
    longest = MAX_PHRASE_CHARACTERS + 2 * len(answer)
    for whole_phrase in statement.phrases[:MAX_PHRASES]:
        phrase = whole_phrase[-longest:]
        if not statement.is_marked and gives_no_answer(phrase):
            break
        if phrase.rstrip().endswith("?"):
            continue
        agrees = right.agrees(phrase)
        if agrees is not None:
            return AnswerVerdict(readable=True, right=agrees)
    return AnswerVerdict(readable=False, right=False)
