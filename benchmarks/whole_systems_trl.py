"""TRL's GRPO trainers on the work of whole_systems_work, as a program of whole_systems.py.

    python benchmarks/whole_systems_trl.py colocated --model FOLDER --rows FILE ...
    python benchmarks/whole_systems_trl.py asynchronous --url http://127.0.0.1:8000 ...

Loads everything, touches `--asked`, waits for `--gate`, and adds one row to `--rows` after each
step. Lengths of replies are forced, and nothing else of TRL's loop is changed.
"""

# ruff: noqa: ANN401 - TRL and vLLM tell no types.

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import whole_systems_work
from whole_systems_work import TASKS, Work, touch_and_wait

GATE_LIMIT_S = 1800.0


def rewards(completions: Any, **_: Any) -> list[float]:
    """A reward function of TRL, for conversations."""
    return [whole_systems_work.reward(str(each[-1]["content"])) for each in completions]


def dataset(work: Work) -> Any:
    """Returns all prompts in TRL's form."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": work.prompt(task)} for task in range(TASKS)])


def common(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that both of TRL's trainers get."""
    device: dict[str, Any] = {"use_cpu": True, "bf16": False} if arguments.cpu else {"bf16": True}
    return {
        "output_dir": str(arguments.rows.parent / "trl-out"),
        "per_device_train_batch_size": arguments.micro,
        "gradient_accumulation_steps": arguments.sequences // arguments.micro,
        "num_generations": arguments.group,
        "max_steps": 100_000,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        **device,
    }


def add_row(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    """Adds one step to the file that whole_systems.py reads."""
    with arguments.rows.open("a") as file:
        print(json.dumps(row), file=file, flush=True)


def _clock(arguments: argparse.Namespace) -> Any:
    """Returns a callback of GRPOTrainer that adds a row after each step, with its parts."""
    import torch
    from transformers import TrainerCallback
    from trl.generation.vllm_generation import VLLMGeneration

    spent = {"generate_s": 0.0, "sync_s": 0.0, "trained_tokens": 0}

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    generate, sync = VLLMGeneration.generate, VLLMGeneration.sync_weights

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

    VLLMGeneration.generate, VLLMGeneration.sync_weights = timed_generate, timed_sync

    class Clock(TrainerCallback):  # type: ignore[misc]
        last = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.last = self.last or now()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            at = now()
            step_s = at - self.last
            rest_s = step_s - spent["generate_s"] - spent["sync_s"]
            row = {"step": state.global_step, "step_s": step_s, **spent, "rest_s": rest_s}
            add_row(arguments, row)
            spent.update(generate_s=0.0, sync_s=0.0, trained_tokens=0)
            self.last = now()

    return Clock()


def colocated(arguments: argparse.Namespace, work: Work) -> None:
    """Runs GRPOTrainer, whose engine is in the trainer's process."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    clock = _clock(arguments)
    # TRL hands on neither of these.
    own = (
        {"enforce_eager": True} if arguments.cpu else {"kv_cache_memory_bytes": arguments.kv_bytes}
    )
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
        vllm_max_model_length=longest + 160,
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


def _force_lengths(engine: Any, work: Work) -> None:
    """Gives each request of vLLM's offline engine a length of its own."""
    generate, drawn = engine.generate, 0

    def forced(prompts: Any, sampling_params: Any = None, **options: Any) -> Any:
        nonlocal drawn
        each = []
        for _ in prompts:
            one = sampling_params.clone()
            one.max_tokens, one.ignore_eos = work.length(drawn), True
            drawn += 1
            each.append(one)
        return generate(prompts, sampling_params=each, **options)

    engine.generate = forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mode", choices=("colocated", "asynchronous"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--asked", type=Path, required=True)
    parser.add_argument("--gate", type=Path, required=True)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--memory", type=float, default=0.4, help="of the GPU, when colocated")
    parser.add_argument("--kv-bytes", type=int, default=40 << 30, help="of the cache, likewise")
    parser.add_argument("--staleness", type=int, default=4, help="when asynchronous")
    parser.add_argument("--inflight", type=int, default=512, help="when asynchronous")
    parser.add_argument("--url", default="", help="of vLLM's server, when asynchronous")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    work = Work.of_environ()
    if arguments.mode == "colocated":
        colocated(arguments, work)
    else:
        from whole_systems_trl_async import asynchronous

        asynchronous(arguments, work)
    # Threads and processes of trainer and engine would keep the program alive.
    os._exit(0)


if __name__ == "__main__":
    main()
