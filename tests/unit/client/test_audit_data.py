"""What `slipstream check` tells of a file's questions and right answers."""

import random

from slipstream.client.audit_data import Row, surprises

TOWNS = [
    "Lisbon",
    "Ankara",
    "Nairobi",
    "Quito",
    "Hanoi",
    "Oslo",
    "Dakar",
    "Lima",
    "Cairo",
    "Riga",
]


def told(prompts: list[str], answers: list[str]) -> str:
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        row = Row(len(rows), [("user", prompt)], answer)
        rows.append(row)
    return "\n".join(surprises(rows, is_interactive=False))


def shown_as_shifted(prompts: list[str], answers: list[str]) -> bool:
    return "shifted" in told(prompts, answers)


def rotated(answers: list[str], shift: int) -> list[str]:
    return answers[-shift:] + answers[:-shift]


def sums() -> tuple[list[str], list[str]]:
    prompts = []
    answers = []
    for first in random.sample(range(10, 99), 40):
        second = random.randint(10, 99)
        prompt = f"What is {first} + {second}? Reply with a number."
        prompts.append(prompt)
        total = first + second
        answers.append(str(total))
    return prompts, answers


def choices() -> tuple[list[str], list[str]]:
    answers = [f"{town} {number}" for number, town in enumerate(TOWNS)]
    prompts = [
        f"Which town is it? A) none of these B) {answer} C) Rome" for answer in answers
    ]
    return prompts, answers


def passages() -> tuple[list[str], list[str]]:
    prompts = [f"The train left for {town} at noon. Where did it go?" for town in TOWNS]
    return prompts, list(TOWNS)


def test_answers_that_are_shifted_by_one_row_are_told() -> None:
    for questions in (sums, choices, passages):
        prompts, answers = questions()
        lower_answers = rotated(answers, 1)
        below = told(prompts, lower_answers)
        upper_answers = rotated(answers, -1)
        above = told(prompts, upper_answers)
        assert "right answers look shifted by one row" in below, questions
        assert "belong to the prompt before them" in below, questions
        assert "belong to the prompt behind them" in above, questions


def test_answers_in_their_own_rows_are_not_called_shifted() -> None:
    for questions in (sums, choices, passages):
        prompts, answers = questions()
        assert not shown_as_shifted(prompts, answers), questions


def test_answers_in_any_order_are_not_called_shifted() -> None:
    prompts, answers = sums()
    in_any_order = random.sample(answers, len(answers))
    assert not shown_as_shifted(prompts, in_any_order)


def test_answers_that_nothing_ties_to_their_prompts_are_not_called_shifted() -> None:
    numbers = range(20)
    prompts = [f"How many of {number} apples are ripe?" for number in numbers]
    answers = [str(number * 7 % 20) for number in numbers]
    assert not shown_as_shifted(prompts, answers)


def test_passages_that_neighbours_share_are_not_called_shifted() -> None:
    passage = "The trains to " + ", ".join(TOWNS) + " left at noon."
    numbers = range(len(TOWNS))
    prompts = [f"{passage} Where did train {number} go?" for number in numbers]
    assert not shown_as_shifted(prompts, list(TOWNS))


def test_a_prompt_that_asks_for_a_letter_has_letters_as_answers() -> None:
    options = [
        f"What is {n} + 2? A) {n + 2} B) {n + 4} C) {n - 1}" for n in range(1, 9)
    ]
    values = [str(n + 2) for n in range(1, 9)]
    prompts = [f"{question}\nReply with the letter." for question in options]
    letters = ["A"] * 4 + ["B"] * 4
    misfit = "is not of the kind that the prompt asks"
    assert misfit in told(prompts, values)
    assert misfit not in told(prompts, letters)
    assert misfit not in told(options, values)


def test_a_reply_of_the_prompt_that_is_the_right_one_is_told() -> None:
    def said(reply: str) -> str:
        messages = [
            ("user", "What is 2 + 3?"),
            ("assistant", reply),
            ("user", "Again."),
        ]
        rows = [Row(0, messages, reply="5")]
        return "\n".join(surprises(rows, is_interactive=False))

    assert "the prompt holds the right answer in 1 of 1" in said("5")
    assert "holds the right answer" not in said("6")
