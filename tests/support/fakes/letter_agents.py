"""Agents for whole runs with the tiny model, whose words are letters."""

import random
import string

import openai
from slipstream.client import AgentEnvironment, AgentOutcome


class Smallest(AgentEnvironment[list[str]]):
    """The model may try twice to name the first of some letters in the alphabet."""

    def __init__(self, length: int = 3, num_tasks: int = 100) -> None:
        generator = random.Random(0)
        letters = string.ascii_lowercase[:12]
        self._tasks = [generator.sample(letters, length) for _ in range(num_tasks)]
        self._client = openai.AsyncOpenAI(api_key="of no episode", max_retries=0)

    def tasks(self):
        return self._tasks

    async def run(self, task, endpoint):
        client = self._client.with_options(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        )
        messages = [{"role": "user", "content": " ".join(task)}]
        for attempt in (1, 2):
            answer = await client.chat.completions.create(
                model="any", messages=messages
            )
            reply = answer.choices[0].message
            if (reply.content or "").split()[:1] == [min(task)]:
                return AgentOutcome(1 / attempt, {"attempts": attempt})
            messages += [reply, {"role": "user", "content": " ".join(task)}]
        return AgentOutcome(0.0, {"attempts": 2})


class Plainly(Smallest):
    def __init__(self, length: int = 3, num_tasks: int = 100) -> None:
        super().__init__(length, num_tasks)
        self._sync = openai.OpenAI(api_key="of no episode", max_retries=0)

    def run(self, task, endpoint):
        client = self._sync.with_options(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        )
        messages = [{"role": "user", "content": " ".join(task)}]
        with client.chat.completions.create(
            model="any", messages=messages, stream=True
        ) as stream:
            deltas = [
                chunk.choices[0].delta.content or ""
                for chunk in stream
                if chunk.choices
            ]
        return float("".join(deltas).split()[:1] == [min(task)])
