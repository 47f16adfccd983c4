"""An environment of three turns, of which only the second decides."""

from slipstream.client import Environment, Message, StepResult


class ThreeTurns(Environment[int]):
    """The reward of the second reply is its share of the letter that the first prompt shows."""

    def tasks(self) -> range:
        return range(6)

    def reset(self, task: int) -> list[Message]:
        self._letter, self._turn = "abcdef"[task], 0
        return [Message("user", self._letter)]

    def step(self, reply: str) -> StepResult:
        self._turn += 1
        if self._turn == 3:
            return StepResult()
        share = reply.split()[:4].count(self._letter) / 4
        reward = share if self._turn == 2 else 0.0
        return StepResult(reward, done=False, messages=[Message("user", self._letter)])
