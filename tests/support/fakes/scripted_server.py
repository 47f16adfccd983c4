"""A rollout server's half of an agent's episodes, with scripted replies in place of an engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from slipstream.client.episode_host import EpisodeHost
from slipstream.v1 import environment_pb2 as pb

# Imports of an agent take a minute on a busy machine.
LIMIT_S = 300.0

# A function that answers a call: it yields the parts of the reply.
Handler = Callable[[pb.AgentCall], AsyncIterator[pb.ReplyPart]]


@dataclass
class Episode:
    """One episode as the server sees it; `run` plays it to its end."""

    host: EpisodeHost
    handler: Handler
    key: str = "a"
    task_index: int = 0
    calls: list[pb.AgentCall] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def command(self, **command: object) -> pb.WorkerMessage:
        return await asyncio.wait_for(
            self.host.answer(pb.WorkerCommand(**command)), LIMIT_S
        )

    async def reset(self, seed: int = 0) -> pb.Observation:
        command = pb.ResetCommand(
            episode_key=self.key, task_index=self.task_index, seed=seed
        )
        answer = await self.command(reset=command)
        assert not answer.HasField("failure"), answer.failure.message
        return answer.observation

    async def close(self) -> None:
        answer = await self.command(close=pb.CloseCommand(episode_key=self.key))
        assert not answer.HasField("failure"), answer.failure.message

    async def next(self) -> pb.WorkerMessage:
        return await self.command(
            follow_agent=pb.FollowAgentCommand(episode_key=self.key)
        )

    async def run(self) -> pb.WorkerMessage:
        """Resets, answers all calls side by side, closes; returns the result or the failure."""
        assert (await self.reset()).is_agent
        replies: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                answer = await self.next()
                if not answer.HasField("agent_call"):
                    return answer
                call = answer.agent_call
                if call.is_abandoned:
                    self.abandoned.append(call.call)
                    replies[call.call].cancel()
                    continue
                self.calls.append(call)
                replies[call.call] = asyncio.create_task(self.reply(call))
        finally:
            for reply in replies.values():
                reply.cancel()
            await asyncio.gather(*replies.values(), return_exceptions=True)
            await self.close()

    async def reply(self, call: pb.AgentCall) -> None:
        async for part in self.handler(call):
            part.call = call.call
            part.episode_key = self.key
            await self.command(reply_part=part)


def as_json(body: object, status: int = 200, **headers: str) -> pb.ReplyPart:
    fields = {"content-type": "application/json"} | headers
    return pb.ReplyPart(
        status=status,
        headers=[
            pb.HttpHeader(name=name, value=value) for name, value in fields.items()
        ],
        body=json.dumps(body).encode(),
        is_last=True,
    )


def event(
    data: object, *, name: str = "", first: bool = False, last: bool = False
) -> pb.ReplyPart:
    """One part of a streamed reply: one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    lines = [f"event: {name}"] if name else []
    part = pb.ReplyPart(
        body="\n".join([*lines, f"data: {text}", "", ""]).encode(), is_last=last
    )
    if first:
        part.status = 200
        part.headers.add(name="content-type", value="text/event-stream; charset=utf-8")
    return part


def chat_reply(text: str) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def chat_chunk(text: str, finish: str | None = None) -> dict[str, object]:
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": text},
        "finish_reason": finish,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "policy",
        "choices": [choice],
    }


def message_reply(text: str) -> dict[str, object]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }


def answers(reply: Callable[[str], str]) -> Handler:
    """A handler that answers chat completions and messages by `reply` of the last text."""

    async def handle(call: pb.AgentCall) -> AsyncIterator[pb.ReplyPart]:
        parsed = json.loads(call.body)
        text = reply(parsed["messages"][-1]["content"])
        if call.path == "/v1/messages":
            yield as_json(message_reply(text))
        elif not parsed.get("stream"):
            yield as_json(chat_reply(text))
        else:
            words = text.split(" ")
            for index, word in enumerate(words):
                space = " " if index else ""
                yield event(chat_chunk(space + word), first=index == 0)
            yield event(chat_chunk("", "stop"))
            yield event("[DONE]", last=True)

    return handle


async def never(call: pb.AgentCall) -> AsyncIterator[pb.ReplyPart]:
    await asyncio.Event().wait()
    yield pb.ReplyPart()
