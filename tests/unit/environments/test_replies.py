"""Replies as people and models write them, each with the value that a person gives it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies
from slipstream.client import Reply, answer_of
from slipstream.environments.answers import bare, contains, final_of, numbers
from slipstream.environments.math_judge.answer_kinds import judge as math_verdict
from slipstream.environments.questions import Questions
from support.rigs.waiting import LIMIT_S

from deploy.environments.arithmetic import Addition, Arithmetic, last_number
from deploy.environments.functions import code_of

TABLE = Path(__file__).parents[2] / "data" / "replies.jsonl"
REPLIES = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def adds(reply: str) -> float:
    """Whether the code of a reply has a function that adds."""
    code = code_of(answer_of(reply), ["add"])
    code = f"__name__ = 'solution'\n{code}\nassert add(1, 2) == 3"
    ended = subprocess.run(
        [sys.executable, "-ISc", code], capture_output=True, timeout=LIMIT_S
    )
    return float(ended.returncode == 0)


async def value_of(row: dict, folder: Path) -> float:
    """The reward of the built-in environment with this judge."""
    judge = row["judge"]
    answer = row["answer"]
    reply = row["reply"]
    if judge == "math_verify":
        return float(
            math_verdict(answer, answer_of(reply), row.get("question", "")).right
        )
    if judge == "code":
        return adds(reply)
    if judge == "number":
        sums = Arithmetic(format_credit=0.0)
        sums.reset(Addition(int(answer) - 1, "+", 1))
        return sums.step(reply).reward
    path = folder / "data.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": answer}))
    questions = Questions(str(path), judge=judge)
    questions.reset(questions.tasks()[0])
    return (await questions.step(reply)).reward


@pytest.mark.process
@pytest.mark.parametrize("judge", sorted({row["judge"] for row in REPLIES}))
async def test_a_reply_earns_what_a_person_gives_it(judge: str, tmp_path: Path) -> None:
    if judge == "math_verify":
        pytest.importorskip("math_verify")
    rows = [row for row in REPLIES if row["judge"] == judge]
    earned = [await value_of(row, tmp_path) for row in rows]
    wrong = [
        (row, got) for row, got in zip(rows, earned, strict=True) if got != row["value"]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_the_table_has_replies_of_every_kind() -> None:
    assert len(REPLIES) >= 200
    assert len({json.dumps(row) for row in REPLIES}) == len(REPLIES)
    assert {row["value"] for row in REPLIES} == {0, 1}


def test_a_parser_has_the_last_word_on_what_is_content() -> None:
    assert answer_of(Reply("7 </think> 8", content="7")) == "7"
    assert answer_of("<think>a</think>b<think>c") == "b"
    assert Reply("<think>a</think>b").reasoning == "a"
    assert Reply("just b").content == "just b"


LONG = """
from slipstream.client.audit_data import Row, surprises
from slipstream.core.models.thoughts import split_thoughts
from slipstream.environments import answers
from slipstream.environments.math_judge import comparisons, answer_kinds, phrases, statements
from deploy.environments.functions import code_of

readers = [answers.plain, answers.bare, answers.numbers, answers.final_of, code_of,
           split_thoughts, lambda text: answers.contains(text, "7")]
# A judge of mathematics reads the end of a reply alone.
parts = [statements.final_statement, phrases.core,
         *(lambda text, right=right: answer_kinds.judge(right, text)
           for right in ("7", "B", "5 m", "1, 2"))]
for mark in ("`", "~", ".", "7", " ", chr(10), "\\\\boxed{", "<answer>", "<think>", "({[", "or ",
             "A ", "1, ", "< x ", "twenty ", "\\\\frac{", "is ", "not "):
    for read in readers:
        read(mark * (200_000 // len(mark)) + "x")
    for read in parts:
        read(comparisons._read_part(mark * (200_000 // len(mark)) + "x"))
for mark in ('{"k":', ". ", "A) "):
    said = mark * 5_000 + "x"
    list(surprises([Row(0, [("user", said)], said), Row(1, [("user", "q")], "7")],
                   is_interactive=False))
"""


@pytest.mark.long
@pytest.mark.process
def test_a_long_reply_of_marks_is_read_to_its_end() -> None:
    subprocess.run([sys.executable, "-c", LONG], check=True, timeout=LIMIT_S)


MARKS = [
    "<think>",
    "</think>",
    "[THINK]",
    "<|channel|>",
    "final",
    "<|message|>",
    "analysis",
    "assistantfinal",
    "\\boxed{",
    "}",
    "{",
    "\\text{",
    "$",
    "\\$",
    "€",
    "**",
    "_",
    "'",
    '"',
    "```\n",
    "~~~",
    "def add",
    "(",
    ")",
    ":",
    "answer is ",
    "and",
    " or ",
    "\n",
    " ",
    "a",
    "7",
    "1,234",
    "-",
    "−",
    "+",
    ".",
    "½",
]


PIECES = strategies.sampled_from(MARKS) | strategies.text(max_size=3)


@given(strategies.lists(PIECES).map("".join))
def test_any_text_has_an_answer_that_can_be_read(text: str) -> None:
    answer = answer_of(text)
    assert answer in text
    assert isinstance(final_of(answer), str)
    assert isinstance(code_of(answer, ["add"]), str)
    assert last_number(answer) is None or numbers(answer)
    assert not contains(answer, "")
    assert "  " not in bare(answer)
