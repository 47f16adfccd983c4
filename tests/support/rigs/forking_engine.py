"""What a server asks vLLM before it forks its engine, each in a process of its own."""

import asyncio
import multiprocessing.process
import sys
from pathlib import Path

import torch
from slipstream.core.models.model_sizes import read_model_table
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import SamplingSection

from support.rigs.started_engine import become_a_server

# vLLM's kernels of delta nets ask for the GPU when they are imported.
KERNELS = "flash_linear_attention"


class ForkedError(Exception):
    """vLLM would fork its engine now."""


def start_up_to_the_fork(_rank: int, config: Config) -> list[str]:
    """What of CUDA has begun by then; call it in a process of its own."""
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
        return [*started, *(name for name in sys.modules if KERNELS in name)]
    raise AssertionError("vLLM did not get as far as its fork")


def image_questions(_rank: int, folder: Path) -> tuple[list[dict[str, int]], list[str]]:
    """What vLLM says of images, and the kernels of delta nets that it has imported by then."""
    from slipstream.rollout_server.vllm.engine_arguments import tower_values
    from vllm import AsyncEngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    sampling = SamplingSection(max_reply_tokens=8, max_episode_tokens=16, max_images=1)
    values = tower_values(read_model_table(folder), sampling)
    model = AsyncEngineArgs(
        model=str(folder), max_model_len=256, **values
    ).create_model_config()
    info = MULTIMODAL_REGISTRY.create_processor(model).info
    limits = [
        dict(info.get_mm_max_tokens_per_item(256, {"image": 1})),
        dict(info.allowed_mm_limits),
    ]
    return limits, [name for name in sys.modules if KERNELS in name]
