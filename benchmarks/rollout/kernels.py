"""Which kernels a step of a decoding engine takes: vLLM alone, with the server's settings.

    python -m benchmarks.rollout.kernels                           # one GPU, 2 minutes
    python -m benchmarks.rollout.kernels --shape qwen3-8b --kv-gib 33
    python -m benchmarks.rollout.kernels --ours                    # with our kernel for the cache

vLLM runs in this process, so that torch's profiler sees it; the host's work and the kernels are one
after the other here, unlike in a server. A step of `--concurrent` replies with some 400 tokens of
context each is the mean of 8. Prints milliseconds and launches of a step by kernel.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.measure import table
from benchmarks.rollout.setup import add_size_arguments, fill_sizes, make_model

STEPS = 8
# How many tokens each reply has when the profiler begins.
SAMPLED = 250
SHOWN = 26


def engine(arguments: argparse.Namespace, folder: Path) -> Any:  # noqa: ANN401 - vLLM's
    """An engine in this process, with the settings of a rollout server that matter to a step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from slipstream.extensions.fast_decoding.server.arguments import DECODE_BACKEND
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if arguments.ours:
        register_backend(AttentionBackendEnum.FLASH_ATTN, DECODE_BACKEND)
    make_model(folder, arguments.shape, arguments.dtype)
    longest = arguments.prompt_tokens + 2 * SAMPLED + 1
    values: dict[str, Any] = {"model": str(folder), "dtype": arguments.dtype, "seed": 1}
    values |= {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True}
    values |= {"hf_overrides": {"head_dtype": "float32"}, "enable_prefix_caching": False}
    values |= {"max_model_len": longest, "max_num_seqs": arguments.concurrent}
    values |= {"logprobs_mode": "processed_logprobs"}
    values |= {"kv_cache_memory_bytes": int(arguments.kv_gib * (1 << 30))}
    if arguments.device == "cuda":
        values |= {"compilation_config": {"cudagraph_capture_sizes": [arguments.concurrent]}}
    return LLMEngine.from_engine_args(EngineArgs(**values))


def profile(arguments: argparse.Namespace, llm: Any) -> dict[str, tuple[float, float]]:  # noqa: ANN401
    """Returns milliseconds and launches of a step, by kernel."""
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=2 * SAMPLED, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
    )
    for number in range(arguments.concurrent):
        tokens = random.Random(number).choices(range(4, 30), k=arguments.prompt_tokens)
        llm.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
    fewest = 0
    while fewest < SAMPLED:
        outputs = llm.step()
        if len(outputs) == arguments.concurrent:
            fewest = min(len(each.outputs[0].token_ids) for each in outputs)
    on_gpu = arguments.device == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as found:
        for _ in range(STEPS):
            llm.step()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = {}
    for event in found.key_averages():
        spent_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent_us:
            kernels[event.key] = spent_us / 1000 / STEPS, event.count / STEPS
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_size_arguments(parser)
    parser.add_argument("--kv-gib", type=float, default=24.0, help="KV cache")
    parser.add_argument("--ours", action="store_true", help="with the server's own attention")
    arguments = parser.parse_args()
    fill_sizes(arguments)
    with tempfile.TemporaryDirectory() as folder:
        kernels = profile(arguments, engine(arguments, Path(folder) / "model"))
    rows = sorted(kernels.items(), key=lambda each: -each[1][0])
    rows.insert(
        0, ("all", (sum(ms for ms, _ in kernels.values()), sum(n for _, n in kernels.values())))
    )
    cells = [[name[:80], f"{ms:.3f}", f"{launches:.0f}"] for name, (ms, launches) in rows[:SHOWN]]
    print("\n".join(table(["kernel", "ms a step", "launches"], cells)))


if __name__ == "__main__":
    main()
