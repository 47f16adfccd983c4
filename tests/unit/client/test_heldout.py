"""The held-out prompts that a run shows at its end: before, now, and what was asked for."""

import json
from pathlib import Path

import pytest
from slipstream.client.heldout import comparison_lines, special_texts, without_special

SPECIAL = ["<s>", "<reply>"]


def write_tokenizer(folder: Path) -> None:
    tokens = [{"content": text, "special": True} for text in SPECIAL]
    tokens.append({"content": "<tool>", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))


def write_rounds(
    folder: Path, *rounds: tuple[int, dict[int, str]], answer: str | None = "g h"
):
    rows = [
        {
            "evaluation_step": version,
            "evaluation": "held",
            "task_index": task_index,
            "prompt": f"<s> p{task_index} <reply>",
            "reply": reply,
            "answer": answer,
        }
        for version, replies in rounds
        for task_index, reply in replies.items()
    ]
    (folder / "heldout.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows)
    )


def test_each_prompt_has_its_first_reply_its_newest_one_and_the_right_one(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    write_rounds(
        tmp_path,
        (0, {0: "b z\nk", 1: "", 2: "x"}),
        (4, {0: "b g", 1: "c", 2: "x"}),
        (8, {0: "g h", 1: "c" * 50, 2: "x"}),
    )
    assert comparison_lines(tmp_path, tmp_path, 2) == [
        "held out  at version 0  at version 8            asked for",
        "p0        b z k         g h                     g h",
        f"p1        -             {'c' * 21}…  g h",
    ]


def test_nothing_is_compared_without_two_rounds_of_a_prompt(tmp_path: Path) -> None:
    assert comparison_lines(tmp_path, tmp_path, 3) == []
    write_rounds(tmp_path, (0, {0: "a"}))
    assert comparison_lines(tmp_path, tmp_path, 3) == []
    # The first round had failed at the second prompt.
    write_rounds(tmp_path, (0, {0: "a"}), (8, {0: "b", 1: "c"}), answer=None)
    assert comparison_lines(tmp_path, tmp_path, 3) == [
        "held out        at version 0  at version 8",
        "<s> p0 <reply>  a             b",
    ]


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    write_rounds(tmp_path, (0, {0: "a"}), (8, {0: "b"}))
    path = tmp_path / "heldout.jsonl"
    path.write_bytes(
        b'{"evaluation_step": "x"}\n[]\n\xff\n' + path.read_bytes() + b'{"eval'
    )
    assert len(comparison_lines(tmp_path, tmp_path, 3)) == 2


def test_special_tokens_and_escapes_are_not_shown(tmp_path: Path) -> None:
    assert special_texts(tmp_path) == []
    write_tokenizer(tmp_path)
    special = special_texts(tmp_path)
    assert special == ["<reply>", "<s>"]
    assert (
        without_special("<s>a\n b<reply> <tool>\x1b[2J", special)
        == r"a b <tool>\x1b[2J"
    )


@pytest.mark.parametrize("text", ["[]", "{}", '{"added_tokens": 3}', "\xff"])
def test_a_strange_tokenizer_has_no_special_tokens(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    assert special_texts(tmp_path) == []
