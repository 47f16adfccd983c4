"""An agent for whole runs that notes each reply it has read, and takes the same course again."""

import json
import os
import random
import string
import time

import openai
from slipstream.client import AgentEnvironment, AgentOutcome

LETTERS = string.ascii_lowercase[:12]
NUM_TASKS = 24


class CountedTurns(AgentEnvironment[int]):
    """Asks `turns` times for letters, with seeds of its own; its reward counts them.

    `notes` is a file to which each reply adds a line: the first and the present answer's id, the
    turn, the sampled tokens and the time.
    """

    def __init__(self, notes: str, turns: int, pause_s: float = 0.0) -> None:
        self._notes = notes
        self._turns = turns
        self._pause_s = pause_s
        self._client = openai.AsyncOpenAI(api_key="of no episode", max_retries=0)

    def tasks(self):
        return range(NUM_TASKS)

    async def run(self, task, endpoint):
        import asyncio

        client = self._client.with_options(
            base_url=endpoint.base_url, api_key=endpoint.api_key
        )
        generator = random.Random(task)
        messages = []
        score = 0
        first = ""
        for turn in range(self._turns):
            word = " ".join(generator.sample(LETTERS, 2))
            messages = [*messages[-4:], {"role": "user", "content": word}]
            seed = generator.randrange(1 << 30)
            answer = await client.chat.completions.create(
                model="any", messages=messages, seed=seed, max_tokens=6
            )
            first = first or answer.id
            tokens = answer.usage.completion_tokens
            self._note([first, answer.id, turn, tokens, time.time()])
            text = answer.choices[0].message.content or ""
            score += sum(letter in LETTERS[:6] for letter in text)
            messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(self._pause_s)
        return AgentOutcome(score / self._turns)

    def _note(self, values):
        line = json.dumps(values) + "\n"
        file = os.open(self._notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
