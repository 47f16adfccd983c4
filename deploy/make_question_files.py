"""Splits a JSON-lines file of questions and answers, such as GSM8K's, into train and test files.

    python deploy/make_question_files.py gsm8k.jsonl data/gsm8k --answer-after '####'

writes data/gsm8k/train.parquet and test.parquet with the columns question and answer. --seed
decides the split. A question that occurs twice is kept once, so that no question is in both files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.environments.question_files import (
    Columns,
    Question,
    named_rows,
    read_questions,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes both files; returns 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a .jsonl or .parquet file")
    parser.add_argument("target", type=Path, help="folder of the two files")
    parser.add_argument("--question", default="question", help="column of the question")
    parser.add_argument("--answer", default="answer", help="column of the answer")
    parser.add_argument("--answer-after", help="keep of an answer only what follows this text")
    parser.add_argument("--test-fraction", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    arguments = parser.parse_args(argv)
    try:
        columns = Columns(arguments.question, arguments.answer, duplicates="drop")
        questions = read_questions(named_rows(arguments.source), columns)
        rows = [row_of(question, arguments.answer_after) for question in questions]
        train, test = split(rows, arguments.test_fraction, arguments.seed)
        for name, part in (("train", train), ("test", test)):
            path = arguments.target / f"{name}.{arguments.format}"
            write(path, part)
            print(f"{path}: {len(part)} questions")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def row_of(question: Question, answer_after: str | None) -> dict[str, str]:
    """Returns the row of a question that is one text; cuts its answer up to `answer_after`."""
    if len(question.messages) != 1:
        raise ConfigError("a question must be a text here, not a list of messages")
    answer = question.answer
    if answer_after is not None:
        _, found, answer = answer.rpartition(answer_after)
        if not found:
            raise ConfigError(f"an answer has no {answer_after!r}: {question.answer[:80]!r}")
    return {"question": question.messages[0].text, "answer": answer.strip()}


def split(
    rows: Sequence[dict[str, str]], test_fraction: float, seed: int
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns train and test rows in a random order, which is the same for the same seed."""
    num_test = round(len(rows) * test_fraction)
    if not 0 < num_test < len(rows):
        raise ConfigError(
            f"--test-fraction must leave questions on both sides, "
            f"got {test_fraction} of {len(rows)} questions"
        )
    shuffled = random.Random(seed).sample(rows, len(rows))
    return shuffled[num_test:], shuffled[:num_test]


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Writes one file; the suffix of its name decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


if __name__ == "__main__":
    sys.exit(main())
