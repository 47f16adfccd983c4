"""The quickstart's task as agents: programs that call the model over HTTP."""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.parse
from typing import Literal

import openai
from slipstream.client import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.client.environment import StepResult
from slipstream.environments.echo import Echo, Pair


class BareClient:
    """A client that writes requests to sockets and reads JSON from them: next to no cost."""

    def __init__(self) -> None:
        # Connections without a call.
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def reply(self, asked: list[dict[str, str]], endpoint: Endpoint) -> str:
        """Returns the text of the reply; RuntimeError for every status but 200."""
        url = urllib.parse.urlsplit(endpoint.base_url)
        # The gateway closes a connection that nothing used for minutes.
        self._idle = [pair for pair in self._idle if not pair[0].at_eof()]
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps({"model": "policy", "messages": asked}).encode()
        head = (
            f"POST {url.path}/chat/completions HTTP/1.1",
            f"host: {url.netloc}",
            f"authorization: Bearer {endpoint.api_key}",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        length = next(h for h in headers if h.lower().startswith("content-length:"))
        answer = json.loads(await reader.readexactly(int(length.partition(":")[2])))
        self._idle.append((reader, writer))
        if " 200 " not in status:
            raise RuntimeError(f"the endpoint answers {status}: {answer}")
        return str(answer["choices"][0]["message"]["content"] or "")


class EchoAgent(AgentEnvironment[Pair]):
    """Asks through OpenAI's client for what `Echo` asks, and judges the reply as it does."""

    def __init__(
        self,
        num_symbols: int = 12,
        reply_length: int = 4,
        split: Literal["train", "heldout"] = "train",
        seed: int = 0,
    ) -> None:
        """The arguments are those of `Echo`."""
        self._echo = Echo(num_symbols, reply_length, split, seed)
        # The client's default transport looks through all of its connections at each call.
        self._client = openai.AsyncOpenAI(
            api_key="the endpoint has one for each episode",
            http_client=openai.DefaultAioHttpClient(),
        )

    def tasks(self) -> list[Pair]:
        """Returns the ordered pairs of letters of the split."""
        return self._echo.tasks()

    async def run(self, task: Pair, endpoint: Endpoint) -> AgentOutcome:
        """Makes one call."""
        judge = copy.copy(self._echo)
        asked = [{"role": m.role, "content": m.content} for m in judge.reset(task)]
        result = judge.step(await self._reply(asked, endpoint))
        assert isinstance(result, StepResult)
        return AgentOutcome(result.reward, metrics=result.metrics)

    async def _reply(self, asked: list[dict[str, str]], endpoint: Endpoint) -> str:
        client = self._client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
        answer = await client.chat.completions.create(model="policy", messages=asked)
        return answer.choices[0].message.content or ""


class BareAgent(EchoAgent):
    """Does the same without OpenAI's client: what it costs are the gateway and the server."""

    _bare = BareClient()

    async def _reply(self, asked: list[dict[str, str]], endpoint: Endpoint) -> str:
        return await self._bare.reply(asked, endpoint)
