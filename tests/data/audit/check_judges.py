"""Judges that pay what cannot be meant."""

from slipstream.client import Environment, Reply, StepResult


class Sums(Environment[int]):
    """Asks for sums; a subclass says what a reply earns."""

    prompt = "What is {} + 20?"

    def tasks(self) -> list[int]:
        return list(range(3, 15))

    def reset(self, task: int) -> list[dict[str, str]]:
        self.expected_answer = str(task + 20)
        return [{"role": "user", "content": self.prompt.format(task)}]

    def step(self, reply: Reply) -> StepResult:
        return StepResult(reward=self.reward_of(reply.content.strip()))

    def reward_of(self, content: str) -> float:
        raise NotImplementedError


class ErrorIsRight(Sums):
    def reward_of(self, content: str) -> float:
        try:
            return float(int(content) == int(self.expected_answer))
        except ValueError:
            return 1.0


class Inverted(Sums):
    def reward_of(self, content: str) -> float:
        return float(content != self.expected_answer)


class StepPays(Sums):
    def reward_of(self, content: str) -> float:
        return 1.6 if not content else float(content == self.expected_answer)


class NeverRight(Sums):
    def tasks(self) -> list[int]:
        return list(range(3, 33))

    def reward_of(self, content: str) -> float:
        return float(content == self.expected_answer.upper() + "!")


class AlwaysRight(Sums):
    def reward_of(self, content: str) -> float:
        return 1.0


class DearMistake(Sums):
    def reward_of(self, content: str) -> float:
        if not content:
            return 0.0
        return 0.1 if content == self.expected_answer else -1.0


class BoxPays(Sums):
    prompt = "What is {} + 20? Put the number into \\boxed{{}}."

    def reward_of(self, content: str) -> float:
        if content.startswith("\\boxed{"):
            return 0.6
        return 0.4 * float(content == self.expected_answer)
