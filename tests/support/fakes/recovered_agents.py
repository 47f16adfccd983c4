"""Agents for tests whose programs are lost in the middle, each once, and play the same again.

`marks` is a folder where a program leaves a file before it ends its worker.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai
from slipstream.client import AgentEnvironment, AgentOutcome, Endpoint

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
            },
        },
    }
]
TURNS = 6


class _Agent(AgentEnvironment[int]):
    def __init__(self, marks: str, lost_at: tuple[int, ...] = (3,)) -> None:
        self._marks = Path(marks)
        self._lost_at = lost_at
        # The programs that this worker has begun: the check of a run begins some, too.
        self._api = openai.AsyncOpenAI

    def tasks(self) -> list[int]:
        return list(range(10))

    def client(self, endpoint: Endpoint) -> openai.AsyncOpenAI:
        return self._api(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            max_retries=0,
        )

    def is_first(self, name: str) -> bool:
        """Whether nobody has called this with `name` before."""
        try:
            (self._marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def maybe_lost(self, turn: int) -> None:
        """Ends the worker at the turns of `lost_at`, each once."""
        if turn in self._lost_at and self.is_first(f"{type(self).__name__}-{turn}"):
            os.kill(os.getpid(), signal.SIGKILL)


class TurnsAgent(_Agent):
    """Calls a tool in each turn; its prompts have the ids of the calls before."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        messages: list[Any] = [
            {
                "role": "user",
                "content": f"call {task}",
            }
        ]
        async with self.client(endpoint) as api:
            for turn in range(TURNS):
                self.maybe_lost(turn)
                answer = await api.chat.completions.create(
                    model="any",
                    messages=messages,
                    tools=TOOLS,
                    user=f"process {os.getpid()}",
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                (call,) = message.tool_calls or ()
                result = {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": f"call {turn}",
                }
                messages.append(result)
        return AgentOutcome(
            reward=1.0,
            metrics={"messages": len(messages)},
        )


class StreamingAgent(_Agent):
    """Reads streams of each API in turn, and leaves their bytes in a file of its process."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        import httpx2

        words = []
        paths = ("chat/completions", "responses", "messages")
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        seen = self._marks / f"stream-{os.getpid()}"
        async with httpx2.AsyncClient(
            base_url=endpoint.base_url,
            headers=headers,
        ) as api:
            for turn in range(TURNS):
                self.maybe_lost(turn)
                path = paths[turn % len(paths)]
                text = f"turn {turn} of {task} behind {words}"
                body: dict[str, Any] = {
                    "model": "any",
                    "stream": True,
                    "max_tokens": 300,
                }
                if path == "responses":
                    body |= {
                        "input": text,
                        "max_output_tokens": body.pop("max_tokens"),
                    }
                else:
                    body["messages"] = [
                        {
                            "role": "user",
                            "content": text,
                        }
                    ]
                async with api.stream(
                    "POST",
                    f"{endpoint.base_url}/{path}",
                    json=body,
                ) as answer:
                    assert answer.status_code == 200
                    data = b"".join([part async for part in answer.aiter_raw()])
                words.append(len(data))
                with seen.open("ab") as file:
                    file.write(data)
        return AgentOutcome(reward=float(len(words)))


class ParallelAgent(_Agent):
    """Has four chains of calls open at a time, in another order in each of its processes."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        async with self.client(endpoint) as api:
            is_first = self.is_first("order")

            async def chain(number: int) -> int:
                messages: list[Any] = [
                    {
                        "role": "user",
                        "content": "Begin.",
                    }
                ]
                for turn in range(3):
                    await asyncio.sleep(0.05 * (number if is_first else 3 - number))
                    answer = await api.chat.completions.create(
                        model="any",
                        messages=messages,
                    )
                    if turn:
                        self.maybe_lost(turn + 2 * number)
                    messages.append(
                        {
                            "role": "assistant",
                            "content": answer.choices[0].message.content,
                        }
                    )
                    messages.append({"role": "user", "content": f"{number}, {turn}"})
                return len(str(messages))

            sizes = await asyncio.gather(
                *map(
                    chain,
                    range(4),
                )
            )
        return AgentOutcome(reward=float(sum(sizes)))


class DivergingAgent(_Agent):
    """Asks something else at its third call when it is played again."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        is_first = self.is_first("diverging")
        messages: list[Any] = []
        async with self.client(endpoint) as api:
            for turn in range(TURNS):
                self.maybe_lost(turn)
                word = "other" if turn == 2 and not is_first else "same"
                messages.append({"role": "user", "content": f"{word} {turn}"})
                answer = await api.chat.completions.create(
                    model="any",
                    messages=messages,
                )
                content = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": content})
        return AgentOutcome(reward=1.0)


class RaisingAgent(_Agent):
    """Raises behind its second call, once."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        messages: list[Any] = [
            {
                "role": "user",
                "content": "Hello.",
            }
        ]
        async with self.client(endpoint) as api:
            for turn in range(3):
                if turn == 2 and self.is_first("raised"):
                    raise ValueError("a bad day")
                answer = await api.chat.completions.create(
                    model="any",
                    messages=messages,
                )
                content = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": content})
                messages.append({"role": "user", "content": f"And {turn}?"})
        return AgentOutcome(reward=1.0)


class WaitingAgent(_Agent):
    """Waits behind its third call for the file `go`."""

    async def run(self, task: int, endpoint: Endpoint) -> AgentOutcome:
        messages: list[Any] = [
            {
                "role": "user",
                "content": "Hello.",
            }
        ]
        async with self.client(endpoint) as api:
            for turn in range(TURNS):
                while turn == 3 and not (self._marks / "go").exists():
                    await asyncio.sleep(0.01)
                answer = await api.chat.completions.create(
                    model="any",
                    messages=messages,
                )
                content = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": content})
                messages.append({"role": "user", "content": f"And {turn}?"})
        return AgentOutcome(reward=1.0)
