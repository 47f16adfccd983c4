"""TRL's GRPOTrainer with vLLM in its own process, as a program of compare.py.

Loads everything, touches `--asked`, waits for `--gate`, and adds one row to `--rows` after each
step. Lengths of replies are forced, and vLLM is told the bytes of its cache, or on a CPU to be
eager; nothing else of TRL's loop is changed, but that on a CPU no weights go to the engine.
"""

# ruff: noqa: ANN401 - TRL and vLLM tell no types.

from __future__ import annotations

import argparse
import functools
import os
import time
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from benchmarks.whole_systems.setup import peer_parser
from benchmarks.whole_systems.trl import GATE_LIMIT_S, add_row, common, dataset, rewards
from benchmarks.whole_systems.work import Work, touch_and_wait


def _clock(arguments: argparse.Namespace) -> Any:
    """Returns a callback that adds a row after each step, with the seconds of its parts."""
    from transformers import TrainerCallback

    spent = {"generate_s": 0.0, "sync_s": 0.0, "trained_tokens": 0}
    engine = vllm_generation.VLLMGeneration
    generate = engine.generate
    sync = engine.sync_weights

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = now()
        out = generate(self, *args, **kwargs)
        spent["generate_s"] += now() - started
        spent["trained_tokens"] += sum(map(len, out[1]))
        return out

    def timed_sync(self: Any) -> None:
        started = now()
        if not arguments.cpu:  # vLLM has packed its weights there, and TRL cannot update them.
            sync(self)
        spent["sync_s"] += now() - started

    engine.generate = timed_generate
    engine.sync_weights = timed_sync

    class Clock(TrainerCallback):  # type: ignore[misc]
        last = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.last = self.last or now()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            step_s = now() - self.last
            rest_s = step_s - spent["generate_s"] - spent["sync_s"]
            row = {"step": state.global_step, "step_s": step_s, **spent, "rest_s": rest_s}
            add_row(arguments, row)
            spent.update(generate_s=0.0, sync_s=0.0, trained_tokens=0)
            self.last = now()

    return Clock()


def _force_lengths(engine: Any, work: Work) -> None:
    """Gives each request of vLLM's offline engine a length of its own."""
    generate = engine.generate
    drawn = 0

    def forced(prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        nonlocal drawn
        each = []
        for _ in prompts:
            one = sampling_params.clone()
            one.max_tokens = work.length(drawn)
            one.ignore_eos = True
            drawn += 1
            each.append(one)
        return generate(prompts, sampling_params=each, **options)

    engine.generate = forced


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    work = Work.of_environ()
    clock = _clock(arguments)
    # TRL hands on neither of these.
    own = {"enforce_eager": True}
    if not arguments.cpu:
        own = {"kv_cache_memory_bytes": arguments.kv_gib << 30}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **own)
    longest = max(work.tokens, work.longest)
    config = GRPOConfig(
        **common(arguments),
        max_completion_length=longest,
        beta=0.0,
        loss_type="dapo",
        use_liger_kernel=not arguments.cpu,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.memory,
        vllm_max_model_length=longest + work.prompt_words + 34,
        vllm_importance_sampling_correction=False,
        generation_kwargs={"ignore_eos": True},
        model_init_kwargs={
            "dtype": "float32" if arguments.cpu else "bfloat16",
            "attn_implementation": "sdpa",
        },
    )
    trainer = GRPOTrainer(
        model=str(arguments.model),
        reward_funcs=rewards,
        args=config,
        train_dataset=dataset(work),
        callbacks=[clock],
    )
    _force_lengths(trainer.vllm_generation.llm, work)
    touch_and_wait(arguments.asked, arguments.gate, GATE_LIMIT_S)
    trainer.train()
    # Threads and processes of trainer and engine would keep the program alive.
    os._exit(0)


if __name__ == "__main__":
    main()
