"""Runs Megatron-Bridge's own `pretrain` on micro batches that another process has packed.

    python -m benchmarks.learner.pretrain MODEL MICRO_BATCHES --batch-size N

MODEL is a folder with a config.json; MICRO_BATCHES is a file that `entry_point.py` saves. A
line of standard input says how many steps to train. The answer is a line of JSON: the seconds until
the device had done them, the processor seconds, and the most memory of the device.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

# Steps of `pretrain`, more than any benchmark needs: the program is ended from outside.
MOST_STEPS = 100_000


class Turns:
    """The callback at the beginning of each step of `pretrain`: waits there for the next turn."""

    def __init__(
        self, orders: Iterable[str], answers: TextIO, *, settle: Callable[[], object]
    ) -> None:
        """`settle` waits for the device's work; the program exits when no order is left."""
        self._orders, self._answers, self._settle = iter(orders), answers, settle
        self._left = 0
        self._started = clocks()

    def on_train_step_start(self, _context: object) -> None:
        """Ends a turn and waits for the next one; a turn includes the loop's work after a step."""
        if self._left == 0:
            self._settle()
            wall_s, cpu_s = (now - then for now, then in zip(clocks(), self._started, strict=True))
            self._say({"wall_s": wall_s, "cpu_s": cpu_s, "peak_gib": peak_gib()})
            order = next(self._orders, None)
            if order is None:
                raise SystemExit(0)
            self._left = int(order)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._started = clocks()
        self._left -= 1

    def _say(self, answer: dict[str, float]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def clocks() -> tuple[float, float]:
    """Returns wall-clock seconds, and processor seconds of this process."""
    return time.perf_counter(), time.process_time()


def peak_gib() -> float:
    """Returns the most memory of the device in use since the turn began; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def bridge_batch(micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a packed micro batch with the names and shapes of Bridge's own packed datasets."""
    cu_seqlens = micro_batch["cu_seqlens"]
    row = {
        "tokens": micro_batch["token_ids"],
        "labels": micro_batch["targets"],
        "loss_mask": micro_batch["loss_mask"].float(),
        "position_ids": micro_batch["position_ids"],
        # Bridge cuts it at the first -1, whose place is `cu_seqlens_argmin`.
        "cu_seqlens": torch.cat((cu_seqlens, cu_seqlens.new_full((1,), -1))),
    }
    return {name: tensor[None] for name, tensor in row.items()} | {
        "cu_seqlens_argmin": torch.tensor([[len(cu_seqlens)]]),
        "max_seqlen": torch.tensor([[int(cu_seqlens.diff().max())]]),
    }


def pinned(batches: list[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yields the batches again and again, from memory that is pinned already."""
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    for batch in batches:
        batch.update({name: batch[name].pin_memory() for name in names})
    return itertools.cycle(batches)


def container_of(model: Path, micro_batches: Path, batch_size: int) -> Any:  # noqa: ANN401
    """Returns all settings; those that are not Bridge's defaults make it faster, or like ours."""
    from dataclasses import dataclass

    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config as settings
    from megatron.bridge.training.mixed_precision import bf16_mixed
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from transformers import AutoConfig

    batches = [bridge_batch(one) for one in torch.load(micro_batches, weights_only=True)]

    @dataclass
    class Packed(settings.DatasetProvider):
        """The same micro batches for ever, in the form of a dataset of Bridge."""

        def build_datasets(self, _context: object) -> tuple[Any, None, None]:
            return pinned(batches), None, None

    hf_config = AutoConfig.from_pretrained(model)
    provider = AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
    for name, value in {
        "seq_length": max(batch["tokens"].numel() for batch in batches),
        "vocab_size": hf_config.vocab_size,
        "should_pad_vocab": False,
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
    }.items():
        setattr(provider, name, value)
    return settings.ConfigContainer(
        train=settings.TrainingConfig(
            micro_batch_size=1,
            global_batch_size=batch_size,
            train_iters=MOST_STEPS,
            eval_iters=0,
        ),
        model=provider,
        optimizer=settings.OptimizerConfig(
            optimizer="adam",
            lr=1e-6,
            min_lr=0.0,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        ddp=settings.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            average_in_collective=False,
            check_for_nan_in_grad=False,
        ),
        scheduler=settings.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
        ),
        dataset=Packed(dataloader_type="external", num_workers=0),
        logger=settings.LoggerConfig(log_interval=MOST_STEPS),
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=hf_config.vocab_size - 1
        ),
        checkpoint=settings.CheckpointConfig(save=None, load=None),
        rerun_state_machine=settings.RerunStateMachineConfig(check_for_nan_in_loss=False),
        mixed_precision=bf16_mixed(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("micro_batches", type=Path)
    parser.add_argument("--batch-size", type=int, required=True, help="micro batches of a step")
    arguments = parser.parse_args()
    # All other output goes to the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from megatron.bridge.training import initialize
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    # The wheel of Megatron-Core holds the compiled helpers, and no Makefile.
    initialize.compile_helpers = lambda: None
    turns = Turns(sys.stdin, answers, settle=torch.cuda.synchronize)
    callbacks = CallbackManager()
    callbacks.register("on_train_step_start", turns.on_train_step_start)
    pretrain(
        container_of(arguments.model, arguments.micro_batches, arguments.batch_size),
        forward_step,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    main()
