"""Agents for tests: each is an environment that calls the model through a real SDK."""

import asyncio
import json
from typing import Any

import openai
from slipstream.client import AgentEnvironment, AgentOutcome, Endpoint

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


class _Agent(AgentEnvironment[int]):
    def tasks(self) -> list[int]:
        return list(range(10))


def client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    )


async def ask(endpoint: Endpoint, messages: list[Any], **options: Any) -> Any:
    async with client(endpoint) as api:
        request = {"model": "any", "messages": messages, "temperature": 0.5, **options}
        answer = await api.chat.completions.create(**request)
    return answer.choices[0].message


class ToolAgent(_Agent):
    """Calls tools in three turns, asks a reviewer twice at once, and returns its counts."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        messages: list[Any] = [{"role": "user", "content": f"call {task}"}]
        total = 0
        for turn in range(3):
            message = await ask(endpoint, messages, tools=TOOLS)
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                total += json.loads(call.function.arguments)["a"]
                content = f"call {task + turn + 1}"
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": content}
                )
        review = [{"role": "user", "content": "Is it right?"}]
        reviewer = endpoint.branch("reviewer")
        await asyncio.gather(ask(reviewer, review), ask(reviewer, review))
        return AgentOutcome(
            reward=1.0, metrics={"total": total}, shares={"reviewer": 0.5}
        )


class RewardingAgent(_Agent):
    """Gives the replies of all APIs rewards of their own, and its reviewer a reward."""

    def __init__(self) -> None:
        # Two seconds of work, which the others do without.
        import anthropic

        self._anthropic = anthropic.AsyncAnthropic

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        request: Any = {
            "model": "any",
            "messages": [{"role": "user", "content": "one"}],
        }
        async with (
            client(endpoint) as api,
            client(endpoint.branch("reviewer")) as reviewer,
        ):
            completion = await api.chat.completions.create(**request)
            parts = await api.chat.completions.create(**request, stream=True)
            streamed = [part async for part in parts]
            response = await api.responses.create(model="any", input="two")
            reviewed = await reviewer.chat.completions.create(**request)
        async with self._anthropic(
            base_url=endpoint.anthropic_url, api_key=endpoint.api_key, max_retries=0
        ) as api:
            message = await api.messages.create(**request, max_tokens=9)
        replies = (completion, streamed[0], response, reviewed, message)
        rewards = dict(
            zip((reply.id for reply in replies), (1, 2, 4, 16, 8), strict=True)
        )
        rewards |= self.more
        return AgentOutcome(
            self.whole, rewards={"reviewer": 32.0}, reply_rewards=rewards
        )

    more: dict[str, Any] = {}
    whole = 0.5


class StrangerAgent(RewardingAgent):
    more = {"chatcmpl-nobody": 1.0}


class OverpaidAgent(RewardingAgent):
    whole = 1e6


class MiscountingAgent(_Agent):
    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        async with client(endpoint) as api:
            messages: Any = [{"role": "user", "content": "one"}]
            reply = await api.chat.completions.create(model="any", messages=messages)
        return AgentOutcome(0.0, reply_rewards={reply.id: [1.0] * 50})


class PlainAgent(_Agent):
    """Blocks its own thread in a call of the synchronous SDK."""

    def run(self, task: int, endpoint: Endpoint) -> float:
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as api:
            api.chat.completions.create(
                model="any", messages=[{"role": "user", "content": str(task)}]
            )
        return float(task)


class SilentAgent(_Agent):
    async def run(self, task: int, endpoint: Endpoint) -> float:
        return 1.0


class HangingAgent(_Agent):
    async def run(self, task: int, endpoint: Endpoint) -> float:
        await ask(endpoint, [{"role": "user", "content": "hi"}])
        await asyncio.Event().wait()
        return 1.0


class RaisingAgent(_Agent):
    async def run(self, task: int, endpoint: Endpoint) -> float:
        await ask(endpoint, [{"role": "user", "content": "hi"}])
        raise ValueError(f"task {task} is bad")


class GreedyAgent(_Agent):
    """Calls until a limit stops it, and returns a reward all the same."""

    async def run(self, task: int, endpoint: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        try:
            while True:
                message = await ask(endpoint, messages)
                messages += [message.model_dump(exclude_none=True), messages[0]]
        except openai.BadRequestError as error:
            return float(error.code == "context_length_exceeded")
