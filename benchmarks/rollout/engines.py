"""The processes with an engine of `throughput.py`: ours and bare vLLM.

Each reads commands from stdin, `WHAT` and a turn as JSON, and answers with a line on stdout.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import uvloop
from slipstream.core.settings.config import Config

if TYPE_CHECKING:
    from slipstream.rollout_server.engine_interface import Generation, LoadedWeights
    from slipstream.rollout_server.vllm.engine import VllmEngine

REPLY = "RESULT "
START_LIMIT_S = 400.0
# The words that the tokenizer of tests and quickstart knows, and their ids.
WORDS = "abcdefghijklmnopqrstuvwxyz"
WORD_IDS = range(4, 30)
CHECKED_REQUESTS = 64


@dataclass(frozen=True)
class Turn:
    """`requests` requests, `slots` of them at one time, and the lengths of their replies."""

    first_seed: int
    requests: int
    slots: int
    least_tokens: int
    most_tokens: int
    # The first ones are in the middle of their replies, as if the flow had begun long ago.
    staggered: bool = False


Run = Callable[[Turn], Coroutine[Any, Any, dict[str, Any]]]


@dataclass(frozen=True)
class Sizes:
    """The tokens of each prompt and of the longest reply, and what replies are drawn from."""

    prompt_tokens: int
    reply_tokens: int
    top_p: float = 1.0
    top_k: int = 0


def reply_tokens(seed: int, turn: Turn) -> int:
    """The length of a reply; what is left of it where the turn begins in its middle."""
    chosen = random.Random(seed)
    length = chosen.randint(turn.least_tokens, turn.most_tokens)
    if not turn.staggered or seed >= turn.first_seed + turn.slots:
        return length
    # The longer a reply, the likelier it is to be found under way.
    while chosen.randint(1, turn.most_tokens) > length:
        length = chosen.randint(turn.least_tokens, turn.most_tokens)
    return chosen.randint(1, length)


async def in_slots(turn: Turn, generate: Callable[[int, int], Coroutine[Any, Any, int]]) -> int:
    """The tokens of all replies; `generate` takes a seed and how many tokens to sample."""
    slots = asyncio.Semaphore(turn.slots)

    async def one(seed: int) -> int:
        async with slots:
            return await generate(seed, reply_tokens(seed, turn))

    return sum(
        await asyncio.gather(*map(one, range(turn.first_seed, turn.first_seed + turn.requests)))
    )


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Token ids of which no two prompts share a block."""
    return random.Random(seed).choices(WORD_IDS, k=num_tokens)


class Ours:
    """Our engine, asked directly or by a rollout server around it, which joins a controller."""

    def __init__(self, engine: VllmEngine, config: Config, sizes: Sizes, address: str) -> None:
        """`address` is the controller's."""
        from slipstream.core.types import ServerId
        from slipstream.rollout_server.episodes.play import ServedModel
        from slipstream.rollout_server.episodes.renderer import Renderer
        from slipstream.rollout_server.episodes.worker_gateway import WorkerGateway
        from slipstream.rollout_server.service import RolloutServer
        from slipstream.rollout_server.vllm.agent_services import AgentServices

        self._vllm = engine
        self._sizes = sizes
        self._config = config
        self._stop = asyncio.Event()
        gateway = WorkerGateway(config.run_dir / "logs-ours", log_bytes=1 << 20)
        renderer = Renderer(config.model.path)
        agents = AgentServices(engine.llm, renderer, config.rollout_server)
        model = ServedModel(engine, renderer, agents)
        server = RolloutServer(config, address, ServerId("ours"), model, gateway)
        self._serving = asyncio.create_task(server.run(self._stop))
        self._serving.add_done_callback(_give_up)

    async def close(self) -> None:
        self._stop.set()
        await asyncio.wait([self._serving], timeout=20)
        await self._vllm.aclose()
        # Else the finalisers of vLLM's client run behind those of its modules, and log errors.
        gc.unfreeze()
        del self._vllm.llm
        gc.collect()

    @classmethod
    async def start(cls, config: Config, sizes: Sizes, address: str) -> Self:
        """Ready, with the weights that it was started with."""
        from slipstream.core.types import PolicyVersion
        from slipstream.rollout_server.engine_interface import LoadedWeights
        from slipstream.rollout_server.vllm.engine import VllmEngine

        class PresetWeights(VllmEngine):
            """Keeps its weights: none are sent here."""

            async def prepare_weights(self, *_: object) -> None:
                pass

            async def receive_weights(self, publish_id: str) -> LoadedWeights:
                return LoadedWeights(())

        engine = await PresetWeights.start(config, seed=0)
        await engine.pauses.resume(PolicyVersion(0, 0))
        return cls(engine, config, sizes, address)

    def runs(self) -> dict[str, Run]:
        return {"engine": self._generate_all, "check": self._check}

    async def _generate(self, seed: int, num_tokens: int) -> Generation:
        from slipstream.rollout_server.engine_interface import Sampling

        longest = self._config.sampling.max_episode_tokens
        sampling = Sampling(
            temperature=1.0,
            top_p=self._sizes.top_p,
            top_k=self._sizes.top_k,
            max_reply_tokens=num_tokens,
            max_turns=1,
            max_episode_tokens=longest,
            ignore_eos=True,
        )
        reply = await self._vllm.requests.generate(
            f"r{seed}", prompt_of(seed, self._sizes.prompt_tokens), sampling, num_tokens
        )
        assert len(reply.logprobs) == len(reply.token_ids)
        if self._config.replays_sampling:
            assert reply.kept_tokens is not None
        return reply

    async def _generate_all(self, turn: Turn) -> dict[str, Any]:
        async def generate(seed: int, num_tokens: int) -> int:
            return len((await self._generate(seed, num_tokens)).token_ids)

        return {"tokens": await in_slots(turn, generate)}

    async def _check(self, turn: Turn) -> dict[str, Any]:
        """Replies in chunks against the same ones token by token, and a pause in the middle."""
        from slipstream.core.types import PolicyVersion
        from vllm.sampling_params import RequestOutputKind

        first_seed = turn.first_seed
        chunked = await self._seeded(first_seed, RequestOutputKind.FINAL_ONLY)
        streamed = await self._seeded(first_seed, RequestOutputKind.CUMULATIVE)
        same = [a for a, b in zip(chunked, streamed, strict=True) if a[0] == b[0]]
        gaps = [
            abs(x - y)
            for a, b in zip(chunked, streamed, strict=True)
            if a[0] == b[0]
            for x, y in zip(a[1], b[1], strict=True)
        ]
        seeds = range(first_seed, first_seed + CHECKED_REQUESTS)
        start = self._vllm.requests.use().generated_tokens
        length = self._sizes.reply_tokens
        replies = [asyncio.create_task(self._generate(seed, length)) for seed in seeds]
        enough = start + 8 * CHECKED_REQUESTS
        # Replies that failed say so when they are gathered.
        while self._vllm.requests.use().generated_tokens < enough and not all(
            r.done() for r in replies
        ):
            await asyncio.sleep(0.001)
        started_s = time.perf_counter()
        await self._vllm.pauses.pause()
        pause_s = time.perf_counter() - started_s
        await self._vllm.pauses.resume(PolicyVersion(0, 1))
        spans = [reply.version_spans for reply in await asyncio.gather(*replies)]
        return {
            "replies": CHECKED_REQUESTS,
            "same_tokens": len(same),
            "largest_logprob_gap": max(gaps, default=None),
            "replies_of_two_versions": sum(len(span) == 2 for span in spans),
            "pause_ms": round(1000 * pause_s, 2),
        }

    async def _seeded(self, first_seed: int, kind: Any) -> list[tuple[list[int], list[float]]]:  # noqa: ANN401 - vLLM's
        from slipstream.core.types import PolicyVersion
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        llm = self._vllm.llm
        sizes = self._sizes

        async def last(collector: Any) -> Any:  # noqa: ANN401 - vLLM's
            while not (output := await collector.get()).finished:
                pass
            return output

        # All are known before the first step, so that both kinds run in the same batches.
        await self._vllm.pauses.pause()
        waiting = []
        for seed in range(first_seed, first_seed + CHECKED_REQUESTS):
            parameters = SamplingParams(
                seed=seed,
                max_tokens=sizes.reply_tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=kind,
            )
            prompt = tokens_input(prompt_of(seed, sizes.prompt_tokens))
            collector = await llm.add_request(f"{kind.name}{seed}", prompt, parameters)
            waiting.append(asyncio.create_task(last(collector)))
        await self._vllm.pauses.resume(PolicyVersion(0, 0))
        replies = [output.outputs[0] for output in await asyncio.gather(*waiting)]
        return [(list(reply.token_ids), list(reply.logprobs.logprobs)) for reply in replies]


class Bare:
    """Bare vLLM, with the server's settings but for those that make it a rollout server's.

    It computes in the model's type, whatever the server's quantization is.
    """

    def __init__(self, config: Config, sizes: Sizes) -> None:
        from slipstream.rollout_server.vllm.engine_arguments import own_values
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        values: dict[str, Any] = own_values(config, 0) | config.rollout_server.engine
        values["quantization"] = None
        values.pop("kv_cache_dtype", None)
        for ours in ("worker_extension_cls", "weight_transfer_config"):
            del values[ours]
        settings = AsyncEngineArgs(**values).create_engine_config(UsageContext.LLM_CLASS)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self._llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
        self._sizes = sizes
        # Both vLLM's own server and ours do this after the start.
        gc.collect()
        gc.freeze()

    def runs(self) -> dict[str, Run]:
        return {"none": self._runner(), "logprobs": self._runner(logprobs=0, flat_logprobs=True)}

    async def close(self) -> None:
        self._llm.shutdown(timeout=5)
        # The engine's finaliser logs an error when it runs after that of its modules.
        gc.unfreeze()
        del self._llm

    def _runner(self, **extra: Any) -> Run:  # noqa: ANN401 - of vLLM's SamplingParams
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        async def generate(seed: int, num_tokens: int) -> int:
            parameters = SamplingParams(
                temperature=1.0,
                top_p=self._sizes.top_p,
                top_k=self._sizes.top_k,
                max_tokens=num_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
                **extra,
            )
            prompt = tokens_input(prompt_of(seed, self._sizes.prompt_tokens))
            collector = await self._llm.add_request(f"r{seed}", prompt, parameters)
            (reply,) = (await collector.get()).outputs
            if parameters.logprobs is not None:
                assert len(reply.logprobs) == len(reply.token_ids)
            return len(reply.token_ids)

        async def run(turn: Turn) -> dict[str, Any]:
            return {"tokens": await in_slots(turn, generate)}

        return run


Start = Callable[[Config, Sizes, str], Coroutine[Any, Any, Ours | Bare]]


async def main(start: Start, folder: Path, address: str, sizes: Sizes) -> None:
    """Starts one engine by `start`, then does what stdin says until it is closed."""
    from slipstream.core.configuration.config_file import load_config
    from slipstream.rollout_server import child_processes

    config = load_config(folder / "config.toml")
    on_cpu = child_processes.is_cpu_build()
    os.environ.update(child_processes.engine_environment(config, on_cpu=on_cpu))
    child_processes.bind_children()
    with child_processes.limited_start(START_LIMIT_S):
        engine = await start(config, sizes, address)
    runs = engine.runs()
    _answer({"ready": True})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        what, _, turn = line.partition(" ")
        try:
            started_s = time.perf_counter()
            result = await runs[what](Turn(**json.loads(turn)))
            _answer({**result, "seconds": time.perf_counter() - started_s})
        except Exception:  # noqa: BLE001 - told to the benchmark, which goes on with other rows
            _answer({"error": traceback.format_exc()})
    await engine.close()


def _give_up(serving: asyncio.Task[None]) -> None:
    """A server that broke ends its process: its leases would stay unanswered."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def _answer(record: dict[str, Any]) -> None:
    print(REPLY + json.dumps(record), flush=True)


async def _bare(config: Config, sizes: Sizes, _: str) -> Bare:
    return Bare(config, sizes)


def run(start: Start, folder: str, address: str, sizes: str) -> None:
    """Runs `main` with the words of a command line."""
    uvloop.run(main(start, Path(folder), address, Sizes(**json.loads(sizes))))


if __name__ == "__main__":
    starts = {"ours": Ours.start, "unrecorded": Ours.start, "bare": _bare}
    run(starts[sys.argv[1]], *sys.argv[2:])
