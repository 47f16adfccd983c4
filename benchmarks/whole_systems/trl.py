"""TRL's experimental AsyncGRPOTrainer beside a vLLM server, as a program of compare.py.

Loads everything, touches `--asked`, waits for `--gate`, and adds one row to `--rows` after each
step. Two things of TRL are replaced: the length of each request, which is forced, and the attention
kernel. AsyncGRPO takes FlashAttention 3 from the hub, which a GPU's host may not reach; torch's own
FlashAttention 2 has the same arguments. On a CPU a loop computes it, and no weights are sent.
"""

# ruff: noqa: ANN401 - TRL and vLLM tell no types.

from __future__ import annotations

import argparse
import json
import os
import time
from importlib import import_module
from typing import Any

import torch
from trl.experimental.async_grpo import async_rollout_worker, packing

from benchmarks.whole_systems.setup import peer_parser
from benchmarks.whole_systems.work import NO_SEEDS, TASKS, Work, reward, touch_and_wait

GATE_LIMIT_S = 1800.0
LOGGED = ("perf/", "batch/", "sample/", "rollout/")


def rewards(completions: Any, **_: Any) -> list[float]:
    """A reward function of TRL, for conversations."""
    return [reward(str(each[-1]["content"])) for each in completions]


def dataset(work: Work) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": work.prompt(task)} for task in range(TASKS)])


def common(arguments: argparse.Namespace) -> dict[str, Any]:
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
    """Adds one step to the file that compare.py reads."""
    with arguments.rows.open("a") as file:
        print(json.dumps(row), file=file, flush=True)


class ForcedLengths(async_rollout_worker._AsyncRolloutLoop):  # type: ignore[misc]
    """The loop in TRL's process for rollouts; each request gets a length of its own."""

    _drawn = 0

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if path == "/v1/completions":
            payload["max_tokens"] = Work.of_environ().length(self._drawn)
            payload["ignore_eos"] = True
            self._drawn += 1
            if os.environ.get(NO_SEEDS):  # vLLM's sampler on a CPU takes none.
                payload.pop("seed", None)
        return await super()._post(path, payload, *args, **kwargs)


def _looped(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, scale: float) -> Any:
    """Causal attention of each segment, aligned at the end of its keys."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)
    v = v.repeat_interleave(groups, 1)
    out = []
    edges = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
    for first, last, key_first, key_last in edges:
        parts = (q[first:last], k[key_first:key_last], v[key_first:key_last])
        queries, keys, values = (part.transpose(0, 1).float() for part in parts)
        earlier = (key_last - key_first) - (last - first)
        shape = (last - first, key_last - key_first)
        mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(int(earlier))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale
        )
        out.append(attended.transpose(0, 1))
    return torch.cat(out).to(q.dtype)


class TorchFlash:
    """The one function that TRL's `packing.tree_attention` calls."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:
        if not causal or window_size != (-1, -1):
            raise ValueError("only causal attention without a window is replaced")
        scale = softmax_scale or q.shape[-1] ** -0.5
        if not q.is_cuda:
            return _looped(q, k, v, cu_q.tolist(), cu_k.tolist(), scale)
        packed = (q.contiguous(), k.contiguous(), v.contiguous(), cu_q.int(), cu_k.int())
        return torch.ops.aten._flash_attention_forward(
            *packed, int(max_q), int(max_k), 0.0, True, False, scale=scale
        )[0]


def check_attention() -> None:
    """Compares output and gradients with the loop on the GPU; RuntimeError if they differ."""
    generator = torch.Generator("cuda").manual_seed(0)
    queries = [100, 300, 1, 257]
    keys = [228, 300, 129, 400]
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (queries, keys))

    def drawn(tokens: int, heads: int) -> Any:
        return torch.randn(
            (tokens, heads, 128), generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()

    parts = (drawn(cu_q[-1], 16), drawn(cu_k[-1], 8), drawn(cu_k[-1], 8))
    on_gpu = [torch.tensor(each, device="cuda") for each in (cu_q, cu_k)]
    ours = TorchFlash.flash_attn_varlen_func(*parts, *on_gpu, max(queries), max(keys))
    theirs = _looped(*parts, cu_q, cu_k, 128**-0.5)
    weight = torch.randn_like(ours)
    both = [
        (out, *torch.autograd.grad((out.float() * weight).sum(), parts)) for out in (ours, theirs)
    ]
    for mine, other in zip(*both, strict=True):
        gap = ((mine.float() - other.float()).norm() / other.float().norm()).item()
        if gap > 2e-2:
            raise RuntimeError(f"attention differs from the loop by {gap:.2e}")


class _NoTransfer:
    """Takes the weights of a step and sends them nowhere, on a CPU."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


def train(arguments: argparse.Namespace, work: Work) -> None:
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    packing._flash_attn = TorchFlash
    async_rollout_worker.AsyncRolloutWorker._loop_cls = ForcedLengths
    if arguments.cpu:
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    else:
        check_attention()
        import_module("benchmarks.common.older_nccl")

    class Clock(TrainerCallback):  # type: ignore[misc]
        last = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.last = self.last or time.perf_counter()

        def on_log(
            self, _: Any, state: Any, __: Any, logs: dict[str, Any] | None = None, **___: Any
        ) -> None:
            # TRL logs behind the step's publish.
            at = time.perf_counter()
            row = {key: value for key, value in (logs or {}).items() if key.startswith(LOGGED)}
            if "batch/trained_tokens_per_step" not in row:
                return
            row["trained_tokens"] = row["batch/trained_tokens_per_step"]
            add_row(arguments, {"step": state.global_step, "step_s": at - self.last, **row})
            self.last = at

    config = AsyncGRPOConfig(
        **common(arguments),
        max_completion_length=max(work.tokens, work.longest),
        dtype="float32" if arguments.cpu else "bfloat16",
        token_budget=0,
        max_staleness=arguments.staleness,
        max_inflight_tasks=arguments.inflight,
        weight_sync_steps=1,
        vllm_server_base_url=arguments.url,
        vllm_server_timeout=600.0,
    )
    # TRL reads the replies of well-known chat templates only.
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<reply>",
        "fields": {"content": {"close_pattern": r"</s>\s*|$", "content": "text"}},
    }
    trainer = AsyncGRPOTrainer(
        processing_class=tokenizer,
        model=str(arguments.model),
        reward_funcs=rewards,
        args=config,
        train_dataset=dataset(work),
        callbacks=[Clock()],
        weight_transfer=_NoTransfer() if arguments.cpu else None,
    )
    if not arguments.cpu:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=trainer.model, fused_linear_cross_entropy=False)
    touch_and_wait(arguments.asked, arguments.gate, GATE_LIMIT_S)
    trainer.train()


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--inflight", type=int, default=512)
    parser.add_argument("--url", required=True, help="of vLLM's server")
    parser.add_argument("--cpu", action="store_true")
    train(parser.parse_args(), Work.of_environ())
    # Threads and processes of the trainer would keep the program alive.
    os._exit(0)


if __name__ == "__main__":
    main()
