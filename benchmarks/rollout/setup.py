"""What throughput.py and flow.py share: settings, processes with engines, what is found."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import shapes
from benchmarks.common.measure import (
    ROOT,
    note,
    part,
    progress,
    settings_of,
    toml_of,
    write_result,
)
from benchmarks.rollout.engines import REPLY, START_LIMIT_S, Sizes, Turn, reply_tokens
from benchmarks.rollout.episodes import SPECIAL_TOKENS

RUN_LIMIT_S = 240.0
# The turn of a command that needs none.
NO_TURN = Turn(0, 0, 0, 0, 0)
# Name here, and the shape of `benchmarks.common.shapes`.
SHAPES = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B", "tiny": "tiny"}


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """What is run, and on what; `fill_sizes` chooses what is left out."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=list(SHAPES), help="qwen3-0.6b; on a CPU tiny")
    parser.add_argument("--concurrent", type=int, help="requests at one time; 512, on a CPU 64")
    parser.add_argument("--prompt-tokens", type=int, help="128; on a CPU 32")
    parser.add_argument("--reply-tokens", type=int, help="512; on a CPU 64")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--memory", type=float, default=0.42, help="GPU memory of each engine")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--quantization", default="off", help="rollout_server.quantization")
    parser.add_argument("--workers", type=int, default=4, help="environment processes")
    parser.add_argument("--out", type=Path)


def fill_sizes(arguments: argparse.Namespace) -> None:
    """Completes what `add_size_arguments` reads."""
    on_cpu = arguments.device == "cpu"
    arguments.shape = arguments.shape or ("tiny" if on_cpu else "qwen3-0.6b")
    arguments.concurrent = arguments.concurrent or (64 if on_cpu else 512)
    arguments.prompt_tokens = arguments.prompt_tokens or (32 if on_cpu else 128)
    arguments.reply_tokens = arguments.reply_tokens or (64 if on_cpu else 512)
    is_plain = on_cpu and arguments.quantization == "off"
    arguments.dtype = "float32" if is_plain else "bfloat16"
    arguments.enforce_eager = on_cpu


def make_model(folder: Path, shape: str, dtype: str) -> None:
    """A Hugging Face folder without weights."""
    from slipstream.learner.trainer.tiny_model import make_tokenizer

    folder.mkdir(parents=True)
    make_tokenizer(folder)
    config = shapes.SHAPES[SHAPES[shape]].config(dtype, 4096)
    (folder / "config.json").write_text(json.dumps(config))


def config_text(
    arguments: argparse.Namespace,
    folder: Path,
    *,
    records_kept_tokens: bool = True,
) -> str:
    cut = ""
    if records_kept_tokens:
        cut = f"top_p = {arguments.top_p}\ntop_k = {arguments.top_k}"
    engine = {"load_format": "dummy", **json.loads(arguments.engine)}
    engine_settings = ", ".join(f"{key} = {toml_of(value)}" for key, value in engine.items())
    return f"""
[run]
name = "rollout"
dir = "{folder}"
steps = 1

[model]
path = "{folder}/model"
dtype = "{arguments.dtype}"

[algorithm]
group_size = 2
groups_per_step = 1
learning_rate = 1e-5
agreement = "{getattr(arguments, "agreement", "close")}"

[sampling]
max_reply_tokens = {3 * arguments.reply_tokens // 2}
max_episode_tokens = {arguments.prompt_tokens + 3 * arguments.reply_tokens // 2}
{cut}

[debug]
ignore_eos = true

[learner]
micro_batch_tokens = {arguments.prompt_tokens + 3 * arguments.reply_tokens // 2}

[rollout_server]
max_episodes = {arguments.concurrent}
gpu_memory_utilization = {arguments.memory}
tensor_parallel_size = {arguments.tensor_parallel_size}
enforce_eager = {str(arguments.enforce_eager).lower()}
start_timeout_s = {START_LIMIT_S}
quantization = "{arguments.quantization}"
engine = {{ {engine_settings} }}

[controller]
heartbeat_timeout_s = 20
"""


class Server:
    """A child with an engine, and the controller's side of it, a fleet of its own."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        fleet: Any,  # noqa: ANN401 - of the tests, which are no package
        arguments: argparse.Namespace,
    ) -> None:
        """`fleet` serves already."""
        self._child = child
        self.fleet = fleet
        self._arguments = arguments
        self._connection: Any = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, command: Sequence[str], folder: Path, arguments: argparse.Namespace
    ) -> AsyncIterator[Server]:
        """Ready, or RuntimeError."""
        from support.fakes.fake_fleet import FakeFleet

        sizes = Sizes(
            prompt_tokens=arguments.prompt_tokens,
            reply_tokens=arguments.reply_tokens,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
        )
        async with FakeFleet(heartbeat_s=0.5, heartbeat_timeout_s=20) as fleet:
            child = await asyncio.create_subprocess_exec(
                *command,
                str(folder),
                fleet.address,
                json.dumps(dataclasses.asdict(sizes)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            server = cls(child, fleet, arguments)
            try:
                await server._answer(START_LIMIT_S)
                yield server
            finally:
                if child.stdin is not None:
                    child.stdin.close()
                try:
                    await asyncio.wait_for(child.wait(), 60)
                except TimeoutError:
                    child.kill()

    async def join(self) -> None:
        """Waits for the server, gives it a version and the environment."""
        from slipstream.v1 import environment_pb2, fleet_pb2

        self._connection = await self.fleet.joined(60.0)
        await self._connection.serve_version(1, digests=())
        words = self._arguments.prompt_tokens - SPECIAL_TOKENS
        spec = environment_pb2.EnvironmentSpec(
            name="words",
            reference="benchmarks.rollout.episodes:RandomWords",
            args_json=json.dumps({"num_words": words}),
            timeout_s=60,
            num_workers=self._arguments.workers,
        )
        self._connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        report = await self._connection.wait_for("environment")
        if not report.num_tasks:
            raise RuntimeError(report.failure.message)

    async def ask(self, what: str, turn: Turn = NO_TURN) -> dict[str, Any]:
        """What one run found: its tokens and seconds."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{what} {json.dumps(dataclasses.asdict(turn))}\n".encode())
        return await self._answer(RUN_LIMIT_S)

    async def episodes(self, turn: Turn, limit_s: float) -> dict[str, Any]:
        """Runs `turn.requests` episodes: as many as the other rows send requests.

        RuntimeError when the child ends before.
        """
        working = asyncio.ensure_future(self._episodes(turn, limit_s))
        ending = asyncio.ensure_future(self._child.wait())
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not working.done():
            working.cancel()
            raise RuntimeError("the engine's process ended; its own message stands above")
        return await working

    async def _episodes(self, turn: Turn, limit_s: float) -> dict[str, Any]:
        from slipstream.v1 import fleet_pb2

        fleet = self.fleet
        fleet.trajectories.clear()
        started_s = time.perf_counter()
        leased = 0
        while leased < turn.requests:
            # A controller does the same: one lease for every free place; each trajectory frees one.
            for number in range(leased, min(turn.slots + len(fleet.trajectories), turn.requests)):
                seed = turn.first_seed + number
                num_tokens = reply_tokens(seed, turn)
                self._connection.lease(
                    f"g{seed}",
                    environment="words",
                    task_index=seed,
                    members=[0],
                    sampling=fleet_pb2.SamplingSettings(
                        temperature=1.0,
                        top_p=self._arguments.top_p,
                        top_k=self._arguments.top_k,
                        max_reply_tokens=num_tokens,
                        max_turns=1,
                        max_episode_tokens=self._arguments.prompt_tokens + num_tokens,
                        ignore_eos=True,
                    ),
                    timeout_s=60.0,
                )
                leased += 1
            if leased < turn.requests:
                await fleet.wait_trajectories(leased - turn.slots + 1, limit_s)
        trajectories = await fleet.wait_trajectories(turn.requests, limit_s)
        seconds = time.perf_counter() - started_s
        failed = {t.failure.message for t in trajectories if t.failure is not None}
        if failed:
            raise RuntimeError(f"episodes failed: {sorted(failed)[:2]}")
        return {"tokens": sum(t.num_sampled_tokens for t in trajectories), "seconds": seconds}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of its own process, and of vLLM's below it."""
        process = psutil.Process(self._child.pid)
        children = process.children(recursive=True)
        engine_processes = [
            child for child in children if "slipstream.client" not in " ".join(child.cmdline())
        ]
        return {"server": _cpu_s([process]), "engine": _cpu_s(engine_processes)}

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._child.stdout is not None
        async with asyncio.timeout(limit_s):
            while line := (await self._child.stdout.readline()).decode():
                if line.startswith(REPLY):
                    record: dict[str, Any] = json.loads(line.removeprefix(REPLY))
                    if "error" in record:
                        raise RuntimeError(record["error"])
                    return record
        raise RuntimeError("the engine's process ended")


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times_by_process = [process.cpu_times() for process in processes]
    return sum(times.user + times.system for times in times_by_process)


@dataclass
class Found:
    """What runs and what was found."""

    arguments: argparse.Namespace
    servers: dict[str, Server] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    async def serve(
        self, stack: contextlib.AsyncExitStack, name: str, command: Sequence[str], folder: Path
    ) -> None:
        """Starts one engine with `folder`'s config.toml; all but the bare one join."""
        starting = Server.start(command, folder, self.arguments)
        server = await stack.enter_async_context(starting)
        if name != "bare":
            async with asyncio.timeout(START_LIMIT_S):
                await server.join()
        self.servers[name] = server

    async def prove(self, name: str) -> None:
        """An engine's log-probabilities are vLLM's, and a change of version pauses it shortly."""
        if name in self.servers:
            with part("check our log-probabilities and a pause", self.failures):
                self.check = await self.servers[name].ask("check")
                progress(json.dumps(self.check))
                note(self.arguments.name, {"row": "check", **self.check})

    def keep(self, row: str, found: dict[str, Any]) -> None:
        self.turns[row].append(found)
        note(self.arguments.name, {"row": row, **found})
        self.write()

    def seeds(self, number: int) -> int:
        """The first of `number` seeds that no other turn has."""
        self.seed += number
        return self.seed - number

    def table(self) -> list[str]:
        raise NotImplementedError

    def write(self) -> None:
        record = {
            "settings": settings_of(self.arguments),
            "check": self.check,
            "turns": self.turns,
            "table": self.table(),
            "failures": self.failures,
        }
        write_result(self.arguments.name, record, self.arguments.out)

    def show(self) -> None:
        self.write()
        print("\n".join(self.table()))
        for name in self.failures:
            print(f"FAILED: {name}")
