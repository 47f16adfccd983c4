"""The quickstart's task as an agent: a program that calls the model through OpenAI's client."""

from __future__ import annotations

import copy
from typing import Literal

import openai
from slipstream.client import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.client.builtin.echo import Echo, Pair
from slipstream.client.environment import StepResult


class EchoAgent(AgentEnvironment[Pair]):
    """Asks for what `Echo` asks, and judges the reply as it does."""

    def __init__(
        self,
        num_symbols: int = 12,
        reply_length: int = 4,
        split: Literal["train", "heldout"] = "train",
        seed: int = 0,
    ) -> None:
        """The arguments are those of `Echo`."""
        self._echo = Echo(num_symbols, reply_length, split, seed)
        self._client = openai.AsyncOpenAI(api_key="the endpoint has one for each episode")

    def tasks(self) -> list[Pair]:
        """Returns the ordered pairs of letters of the split."""
        return self._echo.tasks()

    async def run(self, task: Pair, endpoint: Endpoint) -> AgentOutcome:
        """Makes one call."""
        judge = copy.copy(self._echo)
        asked = [{"role": m.role, "content": m.content} for m in judge.reset(task)]
        client = self._client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
        answer = await client.chat.completions.create(model="policy", messages=asked)
        result = judge.step(answer.choices[0].message.content or "")
        assert isinstance(result, StepResult)
        return AgentOutcome(result.reward, metrics=result.metrics)
