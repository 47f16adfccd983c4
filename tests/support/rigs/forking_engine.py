"""A server that starts its engine up to the moment in which vLLM would fork it."""

import asyncio
import multiprocessing.process
import sys
from typing import Any

import torch
from slipstream.core.settings.config import Config

from support.rigs.started_engine import become_a_server

# vLLM's kernels of delta nets ask for the GPU when they are imported.
KERNELS = "flash_linear_attention"


class ForkedError(Exception):
    """vLLM would fork its engine now."""


def start_up_to_the_fork(config: Config, said: Any) -> None:  # noqa: ANN401 - a queue
    """Puts into `said` what of CUDA has begun by then; call it in a process of its own."""
    become_a_server(config)
    from slipstream.rollout_server.vllm import engine, engine_arguments

    started: list[str] = []

    def fork(_process: object) -> None:
        raise ForkedError

    multiprocessing.process.BaseProcess.start = fork
    torch.cuda._lazy_init = lambda: started.append("CUDA")  # noqa: SLF001
    # What a CPU lacks for adapters is no matter here.
    engine_arguments.cpu_engine_problems = lambda _: ()
    try:
        asyncio.run(engine.VllmEngine.start(config, seed=1))
    except ForkedError:
        said.put([*started, *(name for name in sys.modules if KERNELS in name)])
