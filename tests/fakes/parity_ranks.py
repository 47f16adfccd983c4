"""Parallel layouts, and the program of the ranks that train in them.

Every layout trains the same batches from the same weights. What each saw and made lies in
FOLDER/LAYOUT.pt afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from fake_controller import make_batch
from slipstream.learner.trainer.batch import Batch
from slipstream.protocol.config import Config
from slipstream.protocol.config_file import parse_config
from slipstream.protocol.errors import RunFailed

if TYPE_CHECKING:
    from slipstream.learner.trainer.model import Policy
    from slipstream.learner.trainer.step import TrainingStep

STEPS = 3
VOCAB = 64
SETTINGS = {
    "run": {"name": "parity", "steps": STEPS},
    "model": {"dtype": "float32"},
    "algorithm": {
        "group_size": 4,
        "groups_per_step": 4,
        "max_staleness": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "correction": {"cap": 1.2},
    },
    "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 40, "temperature": 0.8},
    # A small eps would turn the rounding of gradients near 0 into steps of the learning rate.
    "learner": {
        "micro_batch_tokens": 96,
        "weight_decay": 0.01,
        "adam_eps": 1e-3,
        "timeout_s": 300.0,
    },
}


@dataclass(frozen=True)
class Layout:
    """How many ranks, which model, and what differs from `SETTINGS`."""

    world_size: int
    model: str = "llama"
    parallel: dict = field(default_factory=dict)
    learner: dict = field(default_factory=dict)
    algorithm: dict = field(default_factory=dict)
    is_slow: bool = False

    @property
    def reference(self) -> str:
        """The layout of one rank that does the same."""
        suffix = "" if self.model == "llama" else f"-{self.model}"
        return "one" + suffix + ("-mini-batches" if "mini_batches" in self.algorithm else "")


SP = {"tp": 2, "sequence_parallel": True}
DISTRIBUTED_OPTIMIZER = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TWO_MINI_BATCHES = {"mini_batches": 2}
BEHAVIOR_RATIO = {"ratio": "behavior", "correction": {"weight": "none"}}

LAYOUTS = {
    "one": Layout(1),
    "one-mini-batches": Layout(1, algorithm=TWO_MINI_BATCHES),
    "one-behavior-ratio": Layout(1, algorithm=BEHAVIOR_RATIO),
    "one-qwen3": Layout(1, "qwen3"),
    "one-tied": Layout(1, "tied"),
    "one-odd": Layout(1, "odd"),
    "one-moe": Layout(1, "moe"),
    "one-moe-softmax": Layout(1, "moe-softmax"),
    "dp2": Layout(2),
    "dp2-distopt": Layout(2, learner=DISTRIBUTED_OPTIMIZER),
    "dp2-mini-batches": Layout(2, algorithm=TWO_MINI_BATCHES),
    "dp2-overlap": Layout(2, learner=DISTRIBUTED_OPTIMIZER | {"ddp": OVERLAP}),
    "tp2": Layout(2, parallel={"tp": 2}),
    "tp2-odd": Layout(2, "odd", parallel={"tp": 2}),
    "tp2-sp": Layout(2, parallel=SP),
    "tp2-sp-qwen3": Layout(2, "qwen3", parallel=SP),
    "tp2-sp-recompute": Layout(2, parallel=SP, learner={"transformer": FULL_RECOMPUTE}),
    "pp2": Layout(2, parallel={"pp": 2}),
    "pp2-vpp2": Layout(2, parallel={"pp": 2, "vpp": 2}),
    "pp2-tied": Layout(2, "tied", parallel={"pp": 2}),
    "dp2-moe": Layout(2, "moe"),
    "ep2-moe": Layout(2, "moe", parallel={"ep": 2}),
    "ep2-distopt-moe": Layout(2, "moe", parallel={"ep": 2}, learner=DISTRIBUTED_OPTIMIZER),
    "ep2-overlap-moe": Layout(
        2, "moe", parallel={"ep": 2}, learner=DISTRIBUTED_OPTIMIZER | {"ddp": OVERLAP}
    ),
    "etp2-moe": Layout(2, "moe", parallel={"etp": 2}),
    "tp2-sp-moe": Layout(2, "moe", parallel=SP),
    "tp2-sp-etp1-moe": Layout(2, "moe", parallel=SP | {"etp": 1}),
    "tp2-sp-etp1-ep2-moe": Layout(2, "moe", parallel=SP | {"etp": 1, "ep": 2}),
    "tp2-sp-recompute-moe": Layout(2, "moe", parallel=SP, learner={"transformer": FULL_RECOMPUTE}),
    "pp2-moe": Layout(2, "moe", parallel={"pp": 2}),
    "cp2": Layout(2, parallel={"cp": 2}),
    "cp2-qwen3": Layout(2, "qwen3", parallel={"cp": 2}),
    "cp2-tied": Layout(2, "tied", parallel={"cp": 2}),
    "cp2-mini-batches": Layout(2, parallel={"cp": 2}, algorithm=TWO_MINI_BATCHES),
    "tp2-sp-dp2-distopt": Layout(4, parallel=SP, learner=DISTRIBUTED_OPTIMIZER),
    "tp2-sp-pp2-vpp2": Layout(4, parallel=SP | {"pp": 2, "vpp": 2}),
    "tp2-sp-cp2": Layout(4, parallel=SP | {"cp": 2}),
    "cp2-pp2": Layout(4, parallel={"cp": 2, "pp": 2}),
    "dp2-cp2-distopt": Layout(4, parallel={"cp": 2}, learner=DISTRIBUTED_OPTIMIZER),
    "cp4": Layout(4, parallel={"cp": 4}),
    "dp2-pp2-tied": Layout(4, "tied", parallel={"pp": 2}),
    "ep2-dp4-distopt-moe": Layout(4, "moe", parallel={"ep": 2}, learner=DISTRIBUTED_OPTIMIZER),
    "ep2-tp2-sp-moe": Layout(4, "moe", parallel=SP | {"ep": 2}),
    "ep2-pp2-moe": Layout(4, "moe", parallel={"ep": 2, "pp": 2}),
    "ep2-pp2-vpp2-moe": Layout(4, "moe", parallel={"ep": 2, "pp": 2, "vpp": 2}),
    "ep4-tp2-sp-etp1-moe": Layout(4, "moe", parallel=SP | {"ep": 4, "etp": 1}),
}
# A learning rate with which the second step cannot be finite.
OVERFLOW = Layout(1, algorithm={"learning_rate": 1e30})


def layouts_of(world_size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.world_size == world_size]


def config_of(name: str, folder: Path) -> Config:
    layout = OVERFLOW if name == "overflow" else LAYOUTS[name]
    table = json.loads(json.dumps(SETTINGS))
    table["model"]["path"] = str(folder / layout.model)
    table["algorithm"] |= layout.algorithm
    table["learner"] |= layout.learner
    table["learner"] |= {"world_size": layout.world_size, "parallel": layout.parallel}
    return parse_config(table, source=name)


def batches() -> list[Batch]:
    return [
        make_batch(step, num_groups=4, group_size=4, vocab_size=VOCAB, max_tokens=40)
        for step in range(STEPS)
    ]


def probe() -> list[np.ndarray]:
    return [trajectory.token_ids for trajectory in batches()[0].trajectories[:6]]


def make_models(folder: Path) -> None:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "dtype": "float32",
    }
    rope = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    mixture = {
        **sizes,
        **rope,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
        "tied": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
        # A vocabulary that two ranks do not divide.
        "odd": LlamaForCausalLM(
            LlamaConfig(**sizes | {"vocab_size": VOCAB + 1}, tie_word_embeddings=True)
        ),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, **rope, tie_word_embeddings=False)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**mixture, norm_topk_prob=True)),
        "moe-softmax": Qwen3MoeForCausalLM(Qwen3MoeConfig(**mixture, norm_topk_prob=False)),
    }
    for name, model in models.items():
        # Larger weights than a fresh model's, so that attention and norms matter.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3.0)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a layout does."""
    from slipstream.learner.trainer.export import export_weights, hf_tensors, save_hf_folder
    from slipstream.learner.trainer.model import open_policy
    from slipstream.learner.trainer.parallel import Launch
    from slipstream.learner.trainer.schedule import sequence_logprobs
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(job, folder)
    policy = open_policy(config, Launch.from_environment())
    step = TrainingStep(policy, config)
    if job == "overflow":
        torch.save(overflow(policy, step), folder / f"{job}.pt")
        policy.ranks.close()
        return
    finalized = count_finalizations(policy)
    exported = export_weights(policy, config)
    before = {n: t.clone() for n, t in hf_tensors(policy, torch.float32)}
    metrics, logprobs = [], []
    for batch in batches():
        found = sequence_logprobs(policy, probe(), max_tokens=64)
        logprobs.append(torch.from_numpy(np.concatenate(found)))
        metrics.append(step.run(batch).metrics)
    found = sequence_logprobs(policy, probe(), max_tokens=64)
    logprobs.append(torch.from_numpy(np.concatenate(found)))
    weights = {n: t.clone() for n, t in hf_tensors(policy, torch.float32)}
    save_hf_folder(policy, config.model.path, folder / f"{job}-final")
    if exported is not None:
        result = {
            "metrics": metrics,
            "logprobs": logprobs,
            "digest": exported.digest.hex(),
            "before": before,
            "weights": weights,
            "finalizations": len(finalized),
        }
        torch.save(result, folder / f"{job}.pt")
    policy.ranks.close()


def count_finalizations(policy: Policy) -> list[int]:
    settings = policy.chunks[0].config
    finalize, numbers = settings.finalize_model_grads_func, []

    def counted(*args: object, **kwargs: object) -> None:
        numbers.append(1)
        finalize(*args, **kwargs)

    settings.finalize_model_grads_func = counted
    return numbers


def overflow(policy: Policy, step: TrainingStep) -> dict:
    """Steps so far that the next step cannot be finite; how it ended, and if weights moved."""
    from slipstream.learner.trainer.export import hf_tensors

    first, second = batches()[:2]
    step.run(first)
    before = {name: tensor.clone() for name, tensor in hf_tensors(policy, torch.float32)}
    try:
        step.run(second)
    except RunFailed as error:
        after = dict(hf_tensors(policy, torch.float32))
        is_same = all(torch.equal(after[name], before[name]) for name in before)
        return {"error": str(error), "is_same": is_same}
    return {"error": "", "is_same": False}
