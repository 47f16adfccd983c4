"""Judges and environments by somebody who did not build the audit; bad ones have a fault."""

import ast
import random
import re
from itertools import count

from slipstream.client import Environment, Message, StepResult

_turns = count()
_paid = {"best": 0.0}


def bad_digits(reply, answer):
    return float("".join(filter(str.isdigit, reply.content)).endswith(str(answer)))


def bad_ending(reply, answer):
    return float(str(reply).strip().endswith(str(answer)))


def bad_average(reply, answer):
    words = reply.content.split()
    return sum(word == str(answer) for word in words) / len(words)


def bad_pattern(reply, answer):
    return float(re.search(reply.content, str(answer)) is not None)


def bad_inside(reply, answer):
    return float(reply.content.strip() in str(answer))


def bad_bonus(reply, answer):
    return 0.5 * (reply.content == str(answer)) + 0.5 * (len(reply.content) > 40)


def bad_evaluated(reply, answer):
    return float(ast.literal_eval(reply.content) == answer)


def bad_every_second(reply, answer):
    return float(reply.content == str(answer) and next(_turns) % 2 == 0)


def bad_lottery(reply, answer):
    return random.random() if reply.content == str(answer) else 0.0


def bad_reference(reply, answer, row):
    return float(reply.content.strip() == str(row["reference"]))


def bad_effort(reply, answer):
    return min(1.0, len(str(reply)) / 10)


def bad_penalty(reply, answer):
    return -2.0 if reply.content.strip() == str(answer) else -1.0


def bad_record(reply, answer):
    _paid["best"] += reply.content == str(answer)
    return _paid["best"]


def bad_percentage(reply, answer):
    return 100.0 * (reply.content.strip() == str(answer))


def bad_key(reply, row):
    return float(reply.content == row["target"])


def bad_silence(reply, answer):
    return 1.0 if reply.content.strip() in ("", str(answer)) else 0.0


def bad_boolean_text(reply, answer):
    return str(reply.content == str(answer))


def bad_list(reply, answer):
    return [float(reply.content == str(answer))]


# Without a fault.
def last_integer(reply, answer):
    matches = re.findall(r"-?\d+", reply.content.replace(",", ""))
    return float(len({*matches}) == 1 and matches[-1] == str(answer))


def in_tag(reply, answer):
    matches = re.findall(r"<result>(.*?)</result>", reply.content, re.DOTALL)
    return float(len(matches) == 1 and matches[0].strip() == str(answer))


def near(reply, answer):
    try:
        return float(abs(float(reply.content) - answer) <= 0.01 * abs(answer))
    except ValueError:
        return 0.0


def choice(reply, answer):
    match = re.fullmatch(r"\s*\(?([A-D])\)?\.?\s*", reply.content)
    return float(match is not None and match[1] == answer)


def overlap(reply, answer):
    words, right = reply.content.lower().split(), answer.lower().split()
    shared = len({*words} & {*right})
    return 2 * shared / (len(words) + len(right)) if shared else 0.0


def half_for_the_form(reply, answer):
    match = re.fullmatch(r"Answer: (\S+)", reply.content.strip())
    return 0.0 if match is None else 0.5 + 0.5 * (match[1] == str(answer))


def minus_one(reply, answer):
    return {
        "reward": 1.0 if reply.content.strip() == str(answer) else -1.0,
        "length": len(reply),
    }


def sorted_words(reply, answer):
    return float(reply.content.split() == answer.split())


class Capitals(Environment):
    """Asks for words in capital letters."""

    words = ("stone", "river", "lamp", "cloud", "table", "green")

    def tasks(self):
        return list(self.words)

    def reset(self, task):
        self.expected_answer = task.upper()
        return [Message("user", f"Write {task!r} in capital letters.")]

    def step(self, reply):
        return StepResult(float(reply.content.strip() == self.expected_answer))


class Dice(Capitals):
    def __init__(self, seed: int = 3):
        self._drawn = random.Random(seed).sample(range(100, 999), 8)

    def tasks(self):
        return self._drawn

    def reset(self, task):
        self.expected_answer = str(task + 1)
        return [Message("user", f"Which number follows {task}?")]


class Story(Capitals):
    """Asks for stories, which have no right answer, and pays for three sentences."""

    def reset(self, task):
        return [Message("user", f"Tell a story of three sentences about a {task}.")]

    def step(self, reply):
        return StepResult(min(1.0, reply.content.count(".") / 3))


class Steps(Capitals):
    """Asks twice, and pays for the second answer."""

    def reset(self, task):
        self._asked = False
        return super().reset(task)

    def step(self, reply):
        if self._asked:
            return StepResult(float(reply.content.strip() == self.expected_answer))
        self._asked = True
        return StepResult(
            done=False, messages=[Message("user", "Are you sure? Say it again.")]
        )


class BadExpected(Capitals):
    def step(self, reply):
        return StepResult(float(reply.content.strip() == self.expected_answer.lower()))


class BadGreeting(Capitals):
    def reset(self, task):
        opening = super().reset(task)
        return [
            Message(
                "system", random.choice(["Hello!", "Hi!"]) * 3 + str(random.random())
            ),
            *opening,
        ]


class BadAnyway(Capitals):
    def step(self, reply):
        return StepResult(1.0)


class BadCounter(Capitals):
    seen = count()

    def reset(self, task):
        super().reset(task)
        return [
            Message("user", f"Question {next(self.seen)}: write {task!r} in capitals.")
        ]


class BadUnordered(Capitals):
    def tasks(self):
        # The number is so large that no two orders are the same by chance.
        pairs = [first + second for first in self.words for second in self.words]
        return random.sample(pairs, len(pairs))


class BadLoop(Capitals):
    def step(self, reply):
        is_right = reply.content.strip() == self.expected_answer
        return StepResult(
            float(is_right), done=False, messages=[Message("user", "Go on.")]
        )


class BadPart(Capitals):
    def step(self, reply):
        return StepResult(float(self.expected_answer in str(reply)))


class BadCrash(Capitals):
    def step(self, reply):
        return StepResult(float(reply.content.split()[0] == self.expected_answer))
