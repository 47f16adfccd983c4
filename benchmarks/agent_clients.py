"""Measures what an agent's own client costs, without anything of ours.

    python benchmarks/agent_clients.py --repeats 5

A server in another process answers each request at once, with the same bytes. Each client makes
calls, 16 or 256 at one time, and each call has an address and a key of its own, as episodes have.
The processor time is the client's. Prints one table and writes
benchmarks/results/agent_clients.json. Takes a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

import httpx
import openai
from echo_agent import BareClient
from measure import Spread, note, progress, settings_of, table, write_result
from slipstream.client import Endpoint

NAME = "agent_clients"
SERVE = "--serve"
AT_ONCE = (16, 256)
LIMIT_S = 600.0
MESSAGES = [{"role": "user", "content": "a b"}]
# What vLLM answers to the quickstart's task.
MESSAGE = {"role": "assistant", "content": "a b a b", "refusal": None, "tool_calls": []}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "length"}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "policy",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4},
}
BODY = json.dumps(ANSWER).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
RESPONSE = HEAD % len(BODY) + BODY

Call: TypeAlias = Callable[[Endpoint], Awaitable[object]]


async def serve() -> None:
    """Answers every request until the process is ended; prints its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
                writer.write(RESPONSE)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def calls() -> AsyncIterator[dict[str, Call]]:
    """Yields a call by each client; all of an entry's calls share one client."""
    limits = httpx.Limits(max_connections=None)
    async with (
        openai.AsyncOpenAI(api_key="of no episode", timeout=LIMIT_S) as default,
        openai.AsyncOpenAI(
            api_key="of no episode",
            timeout=LIMIT_S,
            http_client=openai.DefaultAioHttpClient(),
        ) as fast,
        httpx.AsyncClient(limits=limits, timeout=LIMIT_S, trust_env=False) as plain,
    ):
        bare = BareClient()

        async def ask(client: openai.AsyncOpenAI, endpoint: Endpoint) -> None:
            client = client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
            await client.chat.completions.create(model="policy", messages=MESSAGES)  # type: ignore[arg-type]

        async def post(endpoint: Endpoint) -> None:
            answer = await plain.post(
                f"{endpoint.base_url}/chat/completions",
                json={"model": "policy", "messages": MESSAGES},
                headers={"Authorization": f"Bearer {endpoint.api_key}"},
            )
            answer.json()

        yield {
            "openai": lambda endpoint: ask(default, endpoint),
            "openai, DefaultAioHttpClient": lambda endpoint: ask(fast, endpoint),
            "httpx": post,
            "a socket and JSON": lambda endpoint: bare.reply(MESSAGES, endpoint),
        }


async def cost_ms(call: Call, port: int, *, number: int, at_once: int) -> float:
    """Returns the milliseconds of this process's processor time for each of `number` calls."""
    room = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with room:
            await call(Endpoint(f"http://127.0.0.1:{port}/{index:022d}", f"sk-{index}"))

    started_s = time.process_time()
    await asyncio.gather(*(one(index) for index in range(number)))
    return 1e3 * (time.process_time() - started_s) / number


async def measure(arguments: argparse.Namespace, port: int) -> dict[str, list[float]]:
    """Returns the costs of a call in every repeat, by client and number of calls at one time."""
    found: dict[str, list[float]] = {}
    async with calls() as clients:
        for repeat in range(-1, arguments.repeats):
            for name, call in clients.items():
                for at_once in AT_ONCE:
                    value = await cost_ms(call, port, number=arguments.calls, at_once=at_once)
                    # The first turn opens connections.
                    if repeat >= 0:
                        found.setdefault(f"{name}; {at_once}", []).append(value)
                        note(NAME, {"client": name, "at_once": at_once, "ms": value})
            progress(f"repeat {repeat}")
    return found


def main() -> None:
    """Measures, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(SERVE, action="store_true", help="only the server")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, SERVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = asyncio.run(measure(arguments, int(server.stdout.readline())))
        finally:
            server.terminate()
    rows = [
        (name, *(Spread.of(found[f"{name}; {number}"]).text(2) for number in AT_ONCE))
        for name in dict.fromkeys(key.partition("; ")[0] for key in found)
    ]
    header = ["client", *(f"ms of a call, {n} at one time (min-max)" for n in AT_ONCE)]
    lines = table(header, rows)
    print("\n".join(lines))
    record = {"settings": settings_of(arguments), "ms": found, "table": lines}
    progress(f"wrote {write_result(NAME, record)}")


if __name__ == "__main__":
    main()
