"""Whole runs of a client's own loop, which `slipstream tinker` starts."""

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from slipstream.core.machine.address import free_port

from support.rigs.loop_client import LoopClient, replies
from support.rigs.run_processes import Command, command
from support.rigs.smallest_run import own_settings
from support.rigs.waiting import LIMIT_S

PROMPT = [1, 5, 6, 7]
GREEDY = {"sampling_params": {"max_tokens": 6, "temperature": 0.0}}
CONFIG = """
[run]
name = "own"
steps = 1000
[model]
dtype = "float32"
[sampling]
max_reply_tokens = 8
max_episode_tokens = 64
"""


@contextlib.asynccontextmanager
async def tinker(
    folder: Path, model: Path, *settings: str
) -> AsyncIterator[tuple[LoopClient, Command]]:
    """A client of the run `own`, and its processes; the run ends well after it."""
    folder.mkdir(exist_ok=True)
    port = free_port("127.0.0.1")
    config = folder / "own.toml"
    config.write_text(CONFIG)
    arguments = (config, "--port", port, *own_settings(folder, model), *settings)
    async with command(folder, "tinker", *arguments, cwd=folder) as run:
        async with LoopClient(port, base_model=str(model)) as client:
            await client.ready(lambda: run.process.returncode is None)
            yield client, run
        run.process.send_signal(signal.SIGINT)
        assert await run.wait(LIMIT_S) == 128 + signal.SIGINT, run.out + run.err


def taught(
    reply: list[int], weight: float = 1.0
) -> tuple[list[int], list[int], dict[str, list[float]]]:
    """The prompt, whose own tokens have no weight, and this reply."""
    tokens = [*PROMPT, *reply]
    weights = [0.0] * (len(PROMPT) - 1) + [weight] * len(reply)
    return tokens[:-1], tokens[1:], {"weights": weights}


async def newest_reply(client: LoopClient) -> list[int]:
    """What the model, published now, most likely replies to the prompt."""
    future = await client.ask(await client.publish(), PROMPT, **GREEDY)
    ((tokens, _, _),) = replies(await client.result(future))
    return tokens
