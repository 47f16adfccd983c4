"""Plays episodes of one environment in the interpreter of its framework, with scripted replies.

    VENV/bin/python framework_episode.py '{"reference": ..., "args": {...}, "episodes": [...]}'

An episode is {"task": 0, "replies": [...]}: the replies of the model by the number of its earlier
replies in a conversation; an object is a call of a tool, {"name": ..., "arguments": {...}}, or a
refusal, {"error": {...}}. Prints a JSON list, an object for each episode.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from slipstream.client.environment_loader import load_environment
from slipstream.client.episode_host import EpisodeHost
from slipstream.core.errors import EnvironmentFailed
from slipstream.v1 import environment_pb2 as pb

from support.fakes.scripted_server import (
    Episode,
    Handler,
    as_json,
    chat_chunk,
    chat_reply,
    event,
)

MARK = "EPISODES "


def scripted(replies: list[Any], seen: list[dict[str, Any]]) -> Handler:

    async def handle(call: pb.AgentCall) -> AsyncIterator[pb.ReplyPart]:
        parsed = json.loads(call.body)
        seen.append({"branch": call.branch, **parsed})
        number = sum(message["role"] == "assistant" for message in parsed["messages"])
        reply = replies[min(number, len(replies) - 1)]
        if isinstance(reply, dict) and "error" in reply:
            yield as_json(reply, status=400)
        elif not isinstance(reply, str):
            body = chat_reply("")
            tool = {"name": reply["name"], "arguments": json.dumps(reply["arguments"])}
            call_of_tool = {
                "id": f"call_{number}",
                "type": "function",
                "function": tool,
            }
            choice = body["choices"][0]  # type: ignore[index]
            choice["message"]["tool_calls"] = [call_of_tool]
            choice["finish_reason"] = "tool_calls"
            yield as_json(body)
        elif not parsed.get("stream"):
            yield as_json(chat_reply(reply))
        else:
            yield event(chat_chunk(reply), first=True)
            yield event(chat_chunk("", "stop"))
            yield event("[DONE]", last=True)

    return handle


async def play(
    host: EpisodeHost, number: int, episode: dict[str, Any]
) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    played = Episode(
        host,
        scripted(episode["replies"], seen),
        key=f"episode-{number}",
        task_index=episode.get("task", 0),
    )
    answer = await played.run()
    result = answer.agent_result
    return {
        "failure": answer.failure.message,
        "reward": result.reward,
        "metrics": dict(result.metrics),
        "shares": dict(result.shares),
        "requests": seen,
    }


async def main() -> None:
    parsed = json.loads(sys.argv[1])
    try:
        environment = load_environment(
            parsed["reference"],
            json.dumps(parsed["args"]),
            parsed.get("search_path", ""),
        )
        host = EpisodeHost(environment)
    except EnvironmentFailed as error:
        print(MARK + json.dumps([{"failure": str(error)}]))
        return
    episodes = [
        play(host, number, episode) for number, episode in enumerate(parsed["episodes"])
    ]
    played = await asyncio.gather(*episodes)
    await host.close_all()
    print(MARK + json.dumps(played))


if __name__ == "__main__":
    asyncio.run(main())
