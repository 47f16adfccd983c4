"""vLLM's own benchmark, `vllm bench throughput`, as it comes: a process for each turn.

Its clock runs from the first request to the last reply; start and warm-up are before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.core.configuration.config_file import load_config
from slipstream.core.models.model_rules import cpu_cache_bytes
from slipstream.core.settings.config import Config
from slipstream.rollout_server import child_processes

from benchmarks.rollout.engines import START_LIMIT_S, Sizes, Turn

# The number of requests sent before the measured ones.
WARM_UP_REQUESTS = 64
# The benchmark's own modes: the offline engine, and the engine below vLLM's server.
MODES = {"offline": [], "asynchronous": ["--async-engine"]}
# The program of `vllm bench throughput`. The command itself asks for an installed package of vLLM's
# name, and the one for CPUs has another.
COMMAND = """
from vllm.entrypoints.cli.benchmark.throughput import BenchmarkThroughputSubcommand as Own
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
Own.add_cli_args(parser)
Own.cmd(parser.parse_args())
"""


def command(config: Config, sizes: Sizes, mode: str, turn: Turn, result: Path) -> list[str]:
    """Has the server's model, sizes and share of the device, and the program's defaults else.

    All requests start together; none is told to return log-probabilities or text.
    """
    server = config.rollout_server
    model = config.model
    options: dict[str, object] = {
        "model": model.path,
        "dtype": model.dtype,
        "load-format": "dummy",
        "seed": turn.first_seed,
        "dataset-name": "random",
        "random-input-len": sizes.prompt_tokens,
        "random-output-len": turn.most_tokens,
        "num-prompts": turn.requests,
        "num-warmups": WARM_UP_REQUESTS,
        "max-model-len": config.sampling.max_episode_tokens,
        "max-num-seqs": turn.slots,
        "gpu-memory-utilization": server.gpu_memory_utilization,
        "tensor-parallel-size": server.tensor_parallel_size,
        "output-json": result,
    }
    if child_processes.is_cpu_build():
        options["kv-cache-memory-bytes"] = cpu_cache_bytes(config)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    switches = ["--disable-detokenize", *MODES[mode]]
    switches += ["--enforce-eager"] if server.enforce_eager else []
    return [sys.executable, "-c", COMMAND, *words, *switches]


async def run(folder: Path, sizes: Sizes, mode: str, turn: Turn) -> dict[str, Any]:
    """Tokens sampled, and seconds; RuntimeError with its last words.

    `folder` has the config.toml of the server, and gets bench.log.
    """
    config = load_config(folder / "config.toml")
    log_path = folder / "bench.log"
    assert turn.least_tokens == turn.most_tokens
    assert turn.requests == turn.slots
    on_cpu = child_processes.is_cpu_build()
    engine_variables = child_processes.engine_environment(config, on_cpu=on_cpu)
    with tempfile.TemporaryDirectory() as results, log_path.open("ab") as log:
        result = Path(results) / "result.json"
        child = await asyncio.create_subprocess_exec(
            *command(config, sizes, mode, turn, result),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **engine_variables},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await child.wait()
        finally:
            # The engine is a process of its own, which may outlive the program.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
        if child.returncode != 0 or not result.exists():
            last_words = log_path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"vllm bench throughput ended with {child.returncode}: {last_words}")
        report = json.loads(result.read_text())
    tokens = turn.requests * turn.most_tokens
    expected_tokens = tokens + turn.requests * sizes.prompt_tokens
    if report["total_num_tokens"] != expected_tokens:
        raise RuntimeError(f"{report['total_num_tokens']} tokens in all, not {expected_tokens}")
    return {"tokens": tokens, "seconds": report["elapsed_time"]}
