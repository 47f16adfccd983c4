"""Measures what a call of an agent costs a rollout server beside a turn of an environment.

    python benchmarks/agent_calls.py --sessions 256 --repeats 7

Both talk to an engine that takes no time. A session has several turns. An agent repeats the whole
conversation in each call, as its clients do; a turn of an environment has one new message. The
agent's calls begin where they reach the server and end where its answer leaves it: its HTTP client
and the gateway in its worker are not part of them. Sessions run side by side on one event loop.
Prints one table and writes benchmarks/results/agent_calls.json. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import uvloop
from measure import Spread, note, progress, settings_of, table, write_result
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion, VersionSpan
from slipstream.rollout_server import process
from slipstream.rollout_server.agents.limits import HttpCall
from slipstream.rollout_server.agents.recorder import Recorder
from slipstream.rollout_server.chat import REPLY, ChatMessage
from slipstream.rollout_server.engine_interface import (
    FinishReason,
    Generation,
    Sampling,
    TextOptions,
    TextPart,
)
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.rollout_server.vllm.agents.opening import AgentApi, Agents

NAME = "agent_calls"
# Tokens of the first part of a streamed reply, and of those behind it.
FIRST, NEXT = 16, 64
QUESTION, MORE = "a b c d e f", "g h i j"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of a file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write", "list", "search")
]


class Instant:
    """An engine whose replies all have the same tokens and come at once."""

    num_experts = 0

    def __init__(self, num_tokens: int, vllm_parts: object) -> None:
        self.vllm_parts = vllm_parts
        words = [chr(ord("a") + n % 26) for n in range(num_tokens - 1)]
        self.text = " ".join(words)
        self._tokens = np.asarray([*(ord(w) - ord("a") + 4 for w in words), 2], dtype=np.uint32)
        self._logprobs = np.full(num_tokens, -0.5, dtype=np.float32)

    def _generation(self) -> Generation:
        spans = (VersionSpan(len(self._tokens), PolicyVersion(0, 1)),)
        return Generation(self._tokens, self._logprobs, spans, FinishReason.STOP)

    async def generate(self, *_: object, **__: object) -> Generation:
        """See `Engine`."""
        await asyncio.sleep(0)
        return self._generation()

    async def stream(
        self, *_: object, options: TextOptions, **__: object
    ) -> AsyncGenerator[TextPart, None]:
        """See `Engine`."""
        await asyncio.sleep(0)
        tokens = self._tokens.tolist()
        cuts = [*range(FIRST, len(tokens), NEXT)] if options.is_streamed else []
        for start, stop in itertools.pairwise((0, *cuts, len(tokens))):
            end = stop == len(tokens)
            # A token is a letter and a blank.
            text = self.text[2 * start : None if end else 2 * stop]
            part = tokens[start:stop]
            yield TextPart(part, text, generation=self._generation() if end else None)
            await asyncio.sleep(0)

    async def cancel(self, request_id: str) -> None:
        """See `Engine`; nothing is ever open."""


def make_config(folder: Path) -> Config:
    """Settings of a model without weights, with the tokenizer of the quickstart."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "deploy"))
    from make_tiny_model import make_tokenizer
    from transformers import LlamaConfig

    make_tokenizer(folder)
    LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(folder)
    table = {
        "run": {"name": NAME, "steps": 1},
        "model": {"path": str(folder), "dtype": "float32"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 512, "max_episode_tokens": 4096, "max_turns": 64},
        "rollout_server": {"enforce_eager": True, "threads": 1, "tool_parser": "hermes"},
    }
    return parse_config(table, source=NAME)


async def agent(
    api: AgentApi, engine: Instant, sampling: Sampling, turns: int, asked: dict[str, object]
) -> None:
    """One session of an agent, which must be one branch."""
    recorder = Recorder(engine, "e", sampling, as_messages=api.as_messages, sampled=lambda _: None)
    messages = [{"role": "user", "content": QUESTION}]
    for number in range(1, turns + 1):
        body = json.dumps({"model": "any", "messages": messages, **asked}).encode()
        call = HttpCall(number, "POST", "/v1/chat/completions", body)
        parts = [part async for part in api.answering.answer(recorder, call)]
        assert parts[0].status == 200, parts[0].body
        messages += [
            {"role": "assistant", "content": engine.text},
            {"role": "user", "content": MORE},
        ]
    (branch,) = recorder.conversations.branches
    assert len(branch.run_lengths) == 2 * turns


async def environment(renderer: Renderer, engine: Instant, sampling: Sampling, turns: int) -> None:
    """One session of an environment, as `Episode` has it."""
    history = [ChatMessage("user", QUESTION)]
    context, tokens = renderer.prompt(history), list[int]()
    for _ in range(turns):
        tokens += context
        generation = await engine.generate("e", tokens, sampling, 512)
        reply = generation.token_ids.tolist()
        tokens += reply
        renderer.decode(reply)
        following = [ChatMessage("user", MORE)]
        context = renderer.continuation([*history, REPLY], following, reply[-1])
        history += [REPLY, *following]


async def cost_ms(session: Callable[[], Awaitable[None]], sessions: int, turns: int) -> float:
    """Milliseconds of processor time of this process for each call."""
    started_s = time.process_time()
    await asyncio.gather(*(session() for _ in range(sessions)))
    return 1e3 * (time.process_time() - started_s) / (sessions * turns)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Returns for each kind of session its cost in every repeat."""
    config = make_config(folder)
    os.environ.update(process.engine_environment(config.rollout_server, on_cpu=True))
    from slipstream.rollout_server.vllm.engine_arguments import engine_config
    from vllm.renderers import renderer_from_config

    settings = engine_config(config, 1)
    parts = SimpleNamespace(vllm_config=settings, renderer=renderer_from_config(settings))
    engine = Instant(arguments.reply_tokens, parts)
    # What an engine's start does.
    gc.collect()
    gc.freeze()
    api = await Agents(engine, config.rollout_server).api()
    renderer, sampling = Renderer(folder), Sampling(1.0, 1.0, 0, 512, 64, 4096)
    turns = arguments.turns
    kinds: dict[str, Callable[[], Awaitable[None]]] = {
        "environment": lambda: environment(renderer, engine, sampling, turns)
    }
    for name, asked in (
        ("agent", {}),
        ("agent with tools", {"tools": TOOLS}),
        ("agent, streamed", {"stream": True, "tools": TOOLS}),
    ):
        kinds[name] = lambda asked=asked: agent(api, engine, sampling, turns, asked)  # type: ignore[misc]
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(-1, arguments.repeats):
        for name, session in kinds.items():
            value = await cost_ms(session, arguments.sessions, turns)
            # The first turn warms everything up.
            if repeat >= 0:
                found[name].append(value)
                note(NAME, {"kind": name, "ms": value})
        progress(f"repeat {repeat}")
    return found


def rows_of(found: dict[str, list[float]]) -> list[Sequence[object]]:
    """Returns the rows of the table: cost of a call, and what it adds to an environment's turn."""
    plain = Spread.of(found["environment"]).median
    return [
        (name, Spread.of(values).text(2), f"{Spread.of(values).median - plain:.2f}")
        for name, values in found.items()
    ]


def main() -> None:
    """Measures, prints the table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--reply-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(arguments, Path(folder)))
    header = ["session", "processor time of a call, ms (min-max)", "added, ms"]
    lines = table(header, rows_of(found))
    print("\n".join(lines))
    record = {"settings": settings_of(arguments), "ms": found, "table": lines}
    progress(f"wrote {write_result(NAME, record)}")


if __name__ == "__main__":
    main()
