"""The opposite of `Echo`, for two adapters of one model with the same prompts."""

from slipstream.client.environment import Message, StepResult, answer_of
from slipstream.environments.echo import Echo, Pair


class Others(Echo):
    """Shows the prompts of `Echo`; the right reply has only letters that are not in the prompt.

    The letters are the first `num_symbols` of the alphabet. The reward is the share of the first
    `reply_length` words that are such letters; a missing word counts as wrong.
    """

    def reset(self, task: Pair) -> list[Message]:
        messages = super().reset(task)
        self.right_reply = self._words(sorted(self._symbols - set(task)))
        self.wrong_reply = self._words(task)
        return messages

    def step(self, reply: str) -> StepResult:
        words = answer_of(reply).split()[: self._reply_length]
        others = self._symbols - set(self._letters)
        return StepResult(reward=sum(word in others for word in words) / self._reply_length)
