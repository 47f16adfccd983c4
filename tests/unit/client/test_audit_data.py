"""What `slipstream check` tells of a file's questions and right answers."""

import random

from slipstream.client.audit_data import Row, surprises

TOWNS = ["Lisbon", "Ankara", "Nairobi", "Quito", "Hanoi", "Oslo", "Dakar", "Lima", "Cairo", "Riga"]


def told(prompts: list[str], answers: list[str]) -> str:
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        row = Row(len(rows), [("user", prompt)], answer)
        rows.append(row)
    return "\n".join(surprises(rows, is_interactive=False))


def rotated(answers: list[str], shift: int) -> list[str]:
    return answers[-shift:] + answers[:-shift]


def sums() -> tuple[list[str], list[str]]:
    prompts = []
    answers = []
    for first in random.sample(range(10, 99), 40):
        second = random.randint(10, 99)
        prompts.append(f"What is {first} + {second}? Reply with a number.")
        answers.append(str(first + second))
    return prompts, answers


def choices() -> tuple[list[str], list[str]]:
    answers = [f"{town} {number}" for number, town in enumerate(TOWNS)]
    prompts = [f"Which town is it? A) none of these B) {answer} C) Rome" for answer in answers]
    return prompts, answers


def passages() -> tuple[list[str], list[str]]:
    prompts = [f"The train left for {town} at noon. Where did it go?" for town in TOWNS]
    return prompts, list(TOWNS)


def test_answers_that_are_shifted_by_one_row_are_told() -> None:
    for made in (sums, choices, passages):
        prompts, answers = made()
        below = told(prompts, rotated(answers, 1))
        above = told(prompts, rotated(answers, -1))
        assert "right answers look shifted by one row" in below, made
        assert "belong to the prompt before them" in below, made
        assert "belong to the prompt behind them" in above, made


def test_answers_in_their_own_rows_are_not_called_shifted() -> None:
    for made in (sums, choices, passages):
        assert "shifted" not in told(*made()), made


def test_answers_in_any_order_are_not_called_shifted() -> None:
    prompts, answers = sums()
    assert "shifted" not in told(prompts, random.sample(answers, len(answers)))


def test_answers_that_nothing_ties_to_their_prompts_are_not_called_shifted() -> None:
    prompts = [f"How many of {number} apples are ripe?" for number in range(20)]
    assert "shifted" not in told(prompts, [str(number * 7 % 20) for number in range(20)])


def test_passages_that_neighbours_share_are_not_called_shifted() -> None:
    passage = "The trains to " + ", ".join(TOWNS) + " left at noon."
    prompts = [f"{passage} Where did train {number} go?" for number in range(len(TOWNS))]
    assert "shifted" not in told(prompts, list(TOWNS))
