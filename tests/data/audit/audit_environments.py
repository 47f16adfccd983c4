"""Environments as people write them: those whose names begin with `Bad` have a fault."""

import base64
import itertools
import random
import time
import uuid

from slipstream.client import Environment, Message, ResetResult, StepResult

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
LOOK = {"type": "function", "function": {"name": "look"}}


class Sums(Environment):
    """Asks for sums."""

    def tasks(self):
        return [(a, b) for a in range(3, 7) for b in range(20, 23)]

    def reset(self, task):
        self.expected_answer = str(sum(task))
        return [Message("user", f"What is {task[0]} + {task[1]}?")]

    def step(self, reply):
        return StepResult(float(reply.content.strip() == self.expected_answer))


# With a fault.
class BadAppends(Sums):
    def tasks(self):
        return [
            {"messages": [{"role": "user", "content": f"Say {word}."}]}
            for word in "abcd"
        ]

    def reset(self, task):
        task["messages"].append({"role": "user", "content": "Be brief."})
        return task["messages"]


class BadChance(Sums):
    def reset(self, task):
        super().reset(task)
        return [Message("user", f"Hint {random.random()}: {task[0]} + {task[1]}?")]


class BadClock(Sums):
    def reset(self, task):
        super().reset(task)
        return [
            Message("system", f"It is {time.time_ns()}."),
            Message("user", str(task)),
        ]


class BadShared(Sums):
    """Keeps what belongs to an episode in what all of them share."""

    def __init__(self):
        self._state = {}

    def reset(self, task):
        opening = super().reset(task)
        self._state["answer"] = self.expected_answer
        return opening

    def step(self, reply):
        return StepResult(float(reply.content.strip() == self._state["answer"]))


class BadHistory(Sums):
    def __init__(self):
        self._asked = []

    def reset(self, task):
        self._asked.append(f"{super().reset(task)[0].text}")
        return [Message("user", "\n".join(self._asked))]


class BadOffer(Sums):
    def reset(self, task):
        tool = {"type": "function", "function": {"name": f"look_{uuid.uuid4().hex}"}}
        return ResetResult(super().reset(task), tools=[tool])


class BadDraw(Sums):
    def tasks(self):
        return [(random.randrange(10**9), 1) for _ in range(4)]


class BadShuffle(Sums):
    def __init__(self):
        self._tasks = super().tasks()

    def tasks(self):
        random.shuffle(self._tasks)
        return list(self._tasks)


class BadSpent(Sums):
    def __init__(self):
        self._tasks = iter(super().tasks())

    def tasks(self):
        return self._tasks


class BadWords(Sums):
    def step(self, reply):
        return "well done"


class BadTurn(Sums):
    def step(self, reply):
        return StepResult(done=False)


class BadOften(Sums):
    """Fails in a quarter of the tasks."""

    def reset(self, task):
        if task[0] == 5:
            raise KeyError("picture")
        return super().reset(task)


class BadUnanswered(Sums):
    def reset(self, task):
        messages = super().reset(task)
        self.expected_answer = "" if task[0] == 5 else self.expected_answer
        return messages

    def step(self, reply):
        return StepResult(
            float(bool(self.expected_answer) and reply.content == self.expected_answer)
        )


class BadBlank(Sums):
    def reset(self, task):
        super().reset(task)
        return [Message("user", "")]


class BadLabels(Sums):
    def reset(self, task):
        super().reset(task)
        return [Message("user", f"What is {task[0]} + x?")]


class BadFree(Environment):
    """Pays for an empty reply."""

    def tasks(self):
        return ["the sea", "rain"]

    def reset(self, task):
        return [Message("user", f"Write about {task}.")]

    def step(self, reply):
        return StepResult(1.0 if len(reply) < 100 else 0.0)


class BadGuess(Sums):
    def step(self, reply):
        return StepResult(1.0 if self.expected_answer in reply else 0.0)


class BadEndless(Sums):
    """Never says done."""

    def step(self, reply):
        right = reply.content.strip() == self.expected_answer
        return StepResult(
            float(right), done=False, messages=[Message("user", "Again?")]
        )


class BadStalling(Sums):
    """Pays for each turn that does not end the episode."""

    def reset(self, task):
        self._turns = 0
        return super().reset(task)

    def step(self, reply):
        self._turns += 1
        if reply.content.strip() == self.expected_answer:
            return StepResult(1.0)
        more = [Message("user", "Try again.")]
        return StepResult(
            0.5, done=self._turns > 20, messages=more if self._turns <= 20 else ()
        )


# Without one.
class Seeded(Sums):
    def reset(self, task):
        super().reset(task)
        number = random.Random(self.seed).random()
        return [Message("user", f"Note {number}: {task[0]} + {task[1]}?")]


class Endless(Sums):
    def tasks(self):
        return ((number, number + 1) for number in itertools.count())


class Sets(Environment):
    """Has tasks whose sets have another order in each process."""

    def tasks(self):
        return [
            {"words": {"red", "green", "blue", word}} for word in ("sea", "sky", "sun")
        ]

    def reset(self, task):
        self.expected_answer = max(task["words"], key=lambda word: (len(word), word))
        return [
            Message(
                "user", f"Which word is longest: {', '.join(sorted(task['words']))}?"
            )
        ]

    def step(self, reply):
        return StepResult(float(reply.content == self.expected_answer))


class Twice(Environment):
    """Has two turns, of which each gives half of the reward."""

    def tasks(self):
        return ["ab", "cd", "ef"]

    def reset(self, task):
        self._left = list(task)
        return self._ask()

    def _ask(self):
        self._letter = self.expected_answer = self._left.pop(0)
        self.right_reply = f"letter {self._letter}"
        return [Message("user", f"Say letter {self._letter}")]

    def step(self, reply):
        reward = 0.5 * (reply.content == f"letter {self._letter}")
        if not self._left:
            return StepResult(reward)
        return StepResult(reward, done=False, messages=self._ask())


class Tools(Sums):
    def reset(self, task):
        return ResetResult(super().reset(task), tools=[LOOK])


class Pictures(Environment):
    """Asks what is in a picture."""

    def tasks(self):
        return ["red", "blue"]

    def reset(self, task):
        self.expected_answer = task
        parts = [
            {"type": "image", "data": PIXEL},
            {"type": "text", "text": "Which colour?"},
        ]
        return [Message("user", parts)]

    def step(self, reply):
        return StepResult(float(reply.content == self.expected_answer))


class Unknown(Environment):
    """Has no right answer: longer is better."""

    def tasks(self):
        return ["the sea", "rain"]

    def reset(self, task):
        return [Message("user", f"Write about {task}.")]

    def step(self, reply):
        return StepResult(min(len(reply.content), 50) / 50)


class Own(Sums):
    """Keeps what `reset` changes to itself."""

    def tasks(self):
        return [{"numbers": [a, 20]} for a in range(3, 7)]

    def reset(self, task):
        return super().reset(list(task["numbers"]))


class Negative(Sums):
    def step(self, reply):
        return StepResult(0.0 if reply.content == self.expected_answer else -1.0)


class Async(Sums):
    async def step(self, reply):
        return super().step(reply)


class Riddle(Sums):
    """Has an answer for people, which is no reply."""

    def reset(self, task):
        messages = super().reset(task)
        self._sum, self.expected_answer = (
            sum(task),
            f"the sum of {task[0]} and {task[1]}",
        )
        return messages

    def step(self, reply):
        return StepResult(float(reply.content == str(self._sum)))


class Guessing(Environment):
    """Begins alike in all tasks, and tells more in each turn."""

    def tasks(self):
        return list(range(10, 90, 7))

    def reset(self, task):
        self._secret, self._turns, self.expected_answer = task, 0, str(task)
        return [Message("user", "Guess my number from 1 to 100.")]

    def step(self, reply):
        self._turns += 1
        if reply.content.strip() == str(self._secret):
            return StepResult(1.0)
        more = [Message("user", "No, try again.")]
        return StepResult(
            done=self._turns == 6, messages=more if self._turns < 6 else ()
        )


class Long(Guessing):
    """Takes forty turns."""

    def step(self, reply):
        self._turns += 1
        if self._turns == 40:
            return StepResult(float(reply.content.strip() == str(self._secret)))
        return StepResult(
            done=False, messages=[Message("user", f"Turn {self._turns}.")]
        )


class Limited(Sums):
    """Draws the limit of each episode's replies."""

    def reset(self, task):
        self.max_reply_tokens = random.randrange(8, 1000)
        return super().reset(task)


# With a fault.
class BadCloses(Sums):
    def close(self):
        raise ValueError("the browser is gone")


# With a fault.
class BadRepeats(Sums):
    def reset(self, task):
        self.said = super().reset(task)
        return self.said

    def step(self, reply):
        if len(self.said) > 1:
            return super().step(reply)
        self.said = [
            *self.said,
            Message("assistant", str(reply)),
            Message("user", "Are you sure?"),
        ]
        return StepResult(0.0, done=False, messages=self.said)


# Sound: the same message again is another one.
class AsksAgain(Sums):
    def reset(self, task):
        self.asked, self.left = super().reset(task), 1
        return self.asked

    def step(self, reply):
        self.left -= 1
        if self.left < 0:
            return super().step(reply)
        return StepResult(0.0, done=False, messages=self.asked)
