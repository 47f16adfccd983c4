"""What a rollout server's tokens cost beside bare vLLM, with and without log-probabilities.

Ours are requests through `VllmEngine`, the object that the server uses, with the sampled token's
log-probability and version; and, in the same process, whole episodes: leases from a controller that
a test plays, an environment's worker processes, trajectories delivered over gRPC. The peer is bare
vLLM: AsyncLLM with the same model and settings, no log-probabilities, only final outputs, no text.
Further rows are bare vLLM with log-probabilities, and our server with an engine that answers at
once: what the server alone could serve. Engines live side by side on the device and take turns; all
weights are random (vLLM's "dummy" format). Before that our engine proves that its log-probabilities
are those that vLLM hands out token by token (`rollout_engines.py`).

    python benchmarks/rollout.py --repeats 5                   # one GPU
    python benchmarks/rollout.py --device cpu --repeats 2      # a rehearsal

Prints one table and writes benchmarks/results/rollout.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from measure import Spread, note, part, progress, table, write_result
from rollout_engines import REPLY, START_LIMIT_S, Sizes
from slipstream.client import Environment, StepResult

HERE = Path(__file__).resolve().parent
NAME = "rollout"
TARGET = 0.90
RUN_LIMIT_S, ALONE_LIMIT_S = 240.0, 60.0
# What the tokenizer of tests and quickstart knows; a prompt is "<s>", words and "<reply>".
WORDS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = 2

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 2048,
    },
}
# Row of the table -> (process, what it does there).
ROWS = {
    "ours, engine with log-probabilities": ("ours", "engine"),
    "ours, whole server with episodes": ("ours", "episodes"),
    "bare vLLM without log-probabilities": ("bare", "none"),
    "bare vLLM with log-probabilities": ("bare", "logprobs"),
}
# Measured alone, at the end.
SERVER_ALONE = "our server with an engine that answers at once"
ENGINES = ("ours", "bare", "instant")
PEER = "bare vLLM without log-probabilities"


RunRow = Callable[[int], Coroutine[Any, Any, dict[str, Any]]]


class RandomWords(Environment[int]):
    """Prompts of random words, each task its own; any reply ends the episode."""

    def __init__(self, num_words: int) -> None:
        """`num_words` in every prompt."""
        self._num_words = num_words

    def tasks(self) -> range:
        """Seeds of prompts."""
        return range(1_000_000)

    def reset(self, task: int) -> list[dict[str, str]]:
        """The words of a task."""
        words = random.Random(task).choices(WORDS, k=self._num_words)
        return [{"role": "user", "content": " ".join(words)}]

    def step(self, reply: str) -> StepResult:
        """Nothing is to be learnt here."""
        return StepResult(reward=0.0)


def make_model(folder: Path, shape: str, dtype: str) -> None:
    """A Hugging Face folder without weights."""
    sys.path.insert(0, str(HERE.parent / "deploy"))
    from make_tiny_model import make_tokenizer

    folder.mkdir(parents=True)
    make_tokenizer(folder)
    sizes = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "dtype": dtype,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(sizes))


def config_text(arguments: argparse.Namespace, folder: Path) -> str:
    """The server's settings."""
    engine = {"load_format": "dummy", **json.loads(arguments.engine)}
    given = ", ".join(f"{key} = {_toml(value)}" for key, value in engine.items())
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

[sampling]
max_reply_tokens = {arguments.reply_tokens}
max_episode_tokens = {arguments.prompt_tokens + arguments.reply_tokens}
ignore_eos = true

[learner]
micro_batch_tokens = {arguments.prompt_tokens + arguments.reply_tokens}

[rollout_server]
max_episodes = {arguments.concurrent}
gpu_memory_utilization = {arguments.memory}
tensor_parallel_size = {arguments.tensor_parallel_size}
enforce_eager = {str(arguments.enforce_eager).lower()}
start_timeout_s = {START_LIMIT_S}
engine = {{ {given} }}

[controller]
heartbeat_timeout_s = 20
"""


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


@dataclass
class EngineProcess:
    """A child with an engine."""

    child: asyncio.subprocess.Process

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, role: str, folder: Path, address: str, sizes: Sizes
    ) -> AsyncIterator[EngineProcess]:
        """Ready, or RuntimeError."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "rollout_engines.py"), role, str(folder), address),
            json.dumps(dataclasses.asdict(sizes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=HERE,
        )
        engine = cls(child)
        try:
            await engine._answer(START_LIMIT_S)
            yield engine
        finally:
            if child.stdin is not None:
                child.stdin.close()
            try:
                await asyncio.wait_for(child.wait(), 60)
            except TimeoutError:
                child.kill()

    async def run(self, what: str, first_seed: int) -> dict[str, Any]:
        """What one run found: its tokens and seconds."""
        assert self.child.stdin is not None
        self.child.stdin.write(f"{what} {first_seed}\n".encode())
        return await self._answer(RUN_LIMIT_S)

    async def meanwhile(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """What `work` finds; RuntimeError when the child ends before."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self.child.wait())
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not working.done():
            working.cancel()
            raise RuntimeError("the engine's process ended; its own message stands above")
        return await working

    async def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self.child.stdout is not None
        async with asyncio.timeout(limit_s):
            while line := (await self.child.stdout.readline()).decode():
                if line.startswith(REPLY):
                    record: dict[str, Any] = json.loads(line.removeprefix(REPLY))
                    if "error" in record:
                        raise RuntimeError(record["error"])
                    return record
        raise RuntimeError("the engine's process ended")


class Episodes:
    """The controller's side: leases, and the trajectories that come back."""

    def __init__(
        self,
        fleet: Any,  # noqa: ANN401 - of the tests, which are no package
        server: EngineProcess,
        arguments: argparse.Namespace,
    ) -> None:
        """`fleet` serves already, `server` is about to join it."""
        self._fleet, self._server = fleet, server
        self._arguments = arguments
        self._connection: Any = None

    async def join(self) -> None:
        """Waits for the server, gives it a version and the environment."""
        from slipstream.v1 import environment_pb2, fleet_pb2

        self._connection = await self._fleet.joined(60.0)
        await self._connection.serve_version(1)
        words = self._arguments.prompt_tokens - SPECIAL_TOKENS
        spec = environment_pb2.EnvironmentSpec(
            name="words",
            reference="rollout:RandomWords",
            args_json=json.dumps({"num_words": words}),
            timeout_s=60,
            num_workers=self._arguments.workers,
        )
        self._connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        report = await self._connection.wait_for("environment")
        if not report.num_tasks:
            raise RuntimeError(report.failure.message)

    async def run(self, first_seed: int) -> dict[str, Any]:
        """As many episodes as requests of the other rows."""
        return await self._server.meanwhile(self._run(first_seed))

    async def _run(self, first_seed: int) -> dict[str, Any]:
        from slipstream.v1 import fleet_pb2

        arguments, fleet = self._arguments, self._fleet
        sampling = fleet_pb2.SamplingSettings(
            temperature=1.0,
            top_p=1.0,
            max_reply_tokens=arguments.reply_tokens,
            max_turns=1,
            max_episode_tokens=arguments.prompt_tokens + arguments.reply_tokens,
            ignore_eos=True,
        )
        fleet.trajectories.clear()
        started_s = time.perf_counter()
        for seed in range(first_seed, first_seed + arguments.concurrent):
            self._connection.lease(
                f"g{seed}",
                environment="words",
                task_index=seed,
                members=[0],
                sampling=sampling,
                timeout_s=60.0,
            )
        trajectories = await fleet.wait_trajectories(arguments.concurrent, RUN_LIMIT_S)
        seconds = time.perf_counter() - started_s
        failed = {t.failure.message for t in trajectories if t.failure is not None}
        if failed:
            raise RuntimeError(f"episodes failed: {sorted(failed)[:2]}")
        return {"tokens": sum(t.num_sampled_tokens for t in trajectories), "seconds": seconds}


async def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    """Both engines side by side; the rows take turns."""
    sys.path.insert(0, str(HERE.parent / "tests" / "fakes"))
    from fake_fleet import FakeFleet

    sizes = Sizes(arguments.concurrent, arguments.prompt_tokens, arguments.reply_tokens)
    failures: dict[str, str] = {}
    engines: dict[str, EngineProcess] = {}
    check: dict[str, Any] = {}
    speeds: dict[str, list[float]] = {row: [] for row in ROWS}
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(FakeFleet(heartbeat_s=0.5, heartbeat_timeout_s=20))
        runs: dict[tuple[str, str], RunRow] = {}
        for role in [role for role in arguments.engines if role != "instant"]:
            with part(f"start {role}", failures):
                starting = EngineProcess.start(role, folder, fleet.address, sizes)
                engines[role] = engine = await stack.enter_async_context(starting)
                episodes = Episodes(fleet, engine, arguments)
                if role == "ours":
                    await episodes.join()
                for process, what in ROWS.values():
                    if process == role:
                        whole = what == "episodes"
                        runs[process, what] = episodes.run if whole else partial(engine.run, what)
        with part("check our log-probabilities and a pause", failures):
            if "ours" in engines:
                check = await engines["ours"].run("check", 0)
                progress(json.dumps(check))
                note(NAME, {"row": "check", **check})
        seed = 0
        # The first turn compiles kernels and fills caches.
        for repeat in range(-1, arguments.repeats):
            for row, key in ROWS.items():
                if key in runs:
                    seed += arguments.concurrent
                    with part(f"repeat {repeat + 1}: {row}", failures):
                        await measure(speeds, row, repeat, runs[key](seed))
    write(arguments, check, speeds, failures)
    if "instant" in arguments.engines:
        with part(SERVER_ALONE, failures):
            speeds[SERVER_ALONE] = []
            async with FakeFleet(heartbeat_s=0.5, heartbeat_timeout_s=20) as fleet:
                starting = EngineProcess.start("instant", folder, fleet.address, sizes)
                async with starting as engine, asyncio.timeout(ALONE_LIMIT_S):
                    episodes = Episodes(fleet, engine, arguments)
                    await episodes.join()
                    for repeat in range(-1, arguments.repeats):
                        run = episodes.run((repeat + 2) * arguments.concurrent)
                        await measure(speeds, SERVER_ALONE, repeat, run)
        write(arguments, check, speeds, failures)
    print("\n".join(table_of(speeds)))
    for name in failures:
        print(f"FAILED: {name}")


def write(
    arguments: argparse.Namespace,
    check: dict[str, Any],
    speeds: dict[str, list[float]],
    failures: dict[str, str],
) -> None:
    """What is known by now."""
    record = {
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        "check": check,
        "tokens_per_s": speeds,
        "table": table_of(speeds),
        "failures": failures,
    }
    write_result(NAME, record, arguments.out)


async def measure(
    speeds: dict[str, list[float]], row: str, repeat: int, run: Coroutine[Any, Any, dict[str, Any]]
) -> None:
    """Adds the speed of a run to its row; the turn before the first is a warm-up."""
    result = await run
    speed = result["tokens"] / result["seconds"]
    progress(f"{speed:,.0f} tokens/s")
    if repeat >= 0:
        speeds[row].append(speed)
        note(NAME, {"row": row, "repeat": repeat, **result})


def table_of(speeds: dict[str, list[float]]) -> list[str]:
    """Medians; ratios are those of the medians, against bare vLLM without log-probabilities."""
    peer = Spread.of(speeds[PEER]).median if speeds[PEER] else float("nan")
    rows: list[Sequence[object]] = []
    for row, values in speeds.items():
        if values:
            spread = Spread.of(values)
            rows.append([row, spread.text(0), f"{spread.median / peer:.3f}"])
    rows.append(["target", "", f"{TARGET:.2f}"])
    return table(["", "tokens/s (min-max)", "ratio to bare"], rows)


def main() -> None:
    """Runs everything interleaved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=list(SHAPES), help="qwen3-0.6b; on a CPU tiny")
    parser.add_argument("--concurrent", type=int, help="requests at one time; 512, on a CPU 64")
    parser.add_argument("--prompt-tokens", type=int, help="128; on a CPU 32")
    parser.add_argument("--reply-tokens", type=int, help="512; on a CPU 64")
    parser.add_argument("--memory", type=float, default=0.42, help="GPU memory of each engine")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--workers", type=int, default=4, help="environment processes")
    parser.add_argument("--engine", default="{}", help="rollout_server.engine of all, as JSON")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"{NAME}.json")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.shape = arguments.shape or ("tiny" if on_cpu else "qwen3-0.6b")
    arguments.concurrent = arguments.concurrent or (64 if on_cpu else 512)
    arguments.prompt_tokens = arguments.prompt_tokens or (32 if on_cpu else 128)
    arguments.reply_tokens = arguments.reply_tokens or (64 if on_cpu else 512)
    arguments.dtype = "float32" if on_cpu else "bfloat16"
    arguments.enforce_eager = on_cpu
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", arguments.shape, arguments.dtype)
        (folder / "config.toml").write_text(config_text(arguments, folder))
        asyncio.run(benchmark(arguments, folder))


if __name__ == "__main__":
    main()
