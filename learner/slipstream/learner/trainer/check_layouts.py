"""Trains a tiny model by a run's algorithm in several layouts, which must all train alike.

`train_alike` needs no GPU: it makes a random Llama of two layers, and a batch of random episodes.
One rank of its own trains first; a second one joins it for the layouts of two ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.configuration.config_file import dump_config, load_config, parse_config
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.algorithms.episode_proof import AnyMetrics
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.ranks.parallel import Launch
from torch import Tensor

VOCAB, LENGTH, PROMPT = 64, 40, 12
GROUPS, STEPS = 4, 2
# Sums in another order differ by rounding, of which a loss that clips makes more.
TOLERANCE = 1e-3
TIMEOUT_S = 120.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _Layout:
    """What differs from one rank with all sequences in one micro batch, none of them shared."""

    learner: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    is_permuted: bool = False

    @property
    def world_size(self) -> int:
        return 2 if self.parallel else 1


LAYOUTS = {
    "one rank": _Layout(),
    "small micro batches": _Layout({"micro_batch_tokens": LENGTH}),
    "shared prefixes": _Layout({"shared_prefix_tokens": 1}),
    "order of episodes": _Layout(is_permuted=True),
    "tp 2": _Layout(parallel={"tp": 2}),
    "pp 2": _Layout({"micro_batch_tokens": LENGTH}, {"pp": 2}),
    "cp 2": _Layout(parallel={"cp": 2}),
}
Trained = dict[str, Tensor]


def train_alike(config: Config, port_of: Mapping[str, int]) -> list[str]:
    """Trains in all `LAYOUTS`, at their ports; returns a line for each that differs from one rank.

    Raises RunFailed when the second rank fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, model in enumerate(("policy", "reference")):
            _make_model(folder / model, seed)
        (folder / "config.toml").write_text(dump_config(config))
        command = [sys.executable, "-m", __name__, name, json.dumps(dict(port_of))]
        with (folder / "rank-1.log").open("w") as log:
            second = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            trained = _train_all(config, folder, port_of, rank=0)
            if second.wait(TIMEOUT_S):
                raise RunFailed(f"rank 1: {(folder / 'rank-1.log').read_text()[-500:]}")
        finally:
            second.kill()
            second.wait()
    reference = trained.pop("one rank")
    found = ((layout, _difference(reference, one)) for layout, one in trained.items())
    return [f"{layout}: {difference}" for layout, difference in found if difference]


def _difference(expected: Trained, found: Trained) -> str:
    for name, mine in expected.items():
        theirs, scale = found[name], float(mine.abs().max())
        gap = float((mine - theirs).abs().max())
        if not gap <= TOLERANCE * scale + 1e-6:
            return f"{name} differs by {gap:.3g} from one rank, its largest number is {scale:.3g}"
    return ""


def _train_all(
    config: Config, folder: Path, port_of: Mapping[str, int], *, rank: int
) -> dict[str, Trained]:
    os.environ.update(MASTER_ADDR=LOOPBACK, LOCAL_RANK=str(rank), RANK=str(rank))
    found = {}
    for name, layout in LAYOUTS.items():
        if rank < layout.world_size:
            os.environ["MASTER_PORT"] = str(port_of[name])
            os.environ["LOCAL_WORLD_SIZE"] = str(layout.world_size)
            found[name] = _train(_settings(config, folder, layout), layout, rank)
    return found


def _train(config: Config, layout: _Layout, rank: int) -> Trained:
    """Trains the steps on this rank, and returns metrics and moves of the weights."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.roles.roles import open_roles
    from slipstream.learner.trainer.step import TrainingStep
    from slipstream.learner.trainer.weights.export import hf_tensors

    policy = open_policy(config, Launch(rank, layout.world_size, rank))
    training = TrainingStep(policy, config, open_roles(config, policy))
    before = {name: tensor.clone() for name, tensor in hf_tensors(policy, torch.float32)}
    found: Trained = {}
    for step in range(STEPS):
        metrics = training.run(_batch(config, step, is_permuted=layout.is_permuted)).metrics
        for name, value in metrics.items():
            if not name.endswith("_s") and name not in ("num_micro_batches", "shared_tokens"):
                found[f"{name} of step {step + 1}"] = torch.tensor(value)
    for name, tensor in hf_tensors(policy, torch.float32):
        found[f"the move of {name}"] = tensor.clone() - before[name]
    policy.ranks.close()
    return found


def _settings(config: Config, folder: Path, layout: _Layout) -> Config:
    """Returns settings of a tiny run with the algorithms of `config`."""
    given = tomllib.loads(dump_config(config))
    changed = {
        "group_size": min(3, config.algorithm.group_size),
        "groups_per_step": GROUPS,
        "max_staleness": 1,
        "learning_rate": 0.05,
        "warmup_steps": 0,
        "mini_batches": 2,
        "epochs": 1,
        "decay": "none",
        "router_replay": "off",
    }
    algorithm = {n: v for n, v in given["algorithm"].items() if not n.startswith("decay_")}
    distinct = {}
    for one in given["environments"]:
        distinct.setdefault(json.dumps(one.get("algorithm"), sort_keys=True), one)
    environments = [
        {key: one[key] for key in ("name", "reference", "algorithm") if key in one}
        for one in distinct.values()
    ]
    for one in (algorithm, *(each.get("algorithm", {}) for each in environments)):
        if one.get("reward") == "overlong":
            one["reward_args"]["cache_tokens"] = 4
    table: dict[str, Any] = {
        "run": {"name": "check", "steps": STEPS},
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "algorithm": algorithm | changed,
        "environments": environments,
        "sampling": {"max_reply_tokens": 16, "max_episode_tokens": LENGTH},
        "learner": {
            "world_size": layout.world_size,
            "parallel": dict(layout.parallel),
            "micro_batch_tokens": 4096,
            "shared_prefix_tokens": 0,
            "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0},
            "weight_decay": 0.0,
            "grad_clip": 0.0,
            "timeout_s": TIMEOUT_S,
            **layout.learner,
        },
    }
    if config.reference is not None:
        table["reference"] = {"path": str(folder / "reference"), "top_k": 5, "parallel": {}}
    if config.critic is not None:
        table["critic"] = {"path": str(folder / "policy")}
    return parse_config(table, source="check")


def _batch(config: Config, step: int, *, is_permuted: bool) -> Batch:
    """Returns random episodes of one or two replies; those of a group have one prompt."""
    chance = np.random.default_rng(step)
    groups = []
    for group in range(GROUPS):
        environment = config.environments[group % len(config.environments)].name
        prompt = chance.integers(0, VOCAB, int(chance.integers(1, PROMPT)))
        members = []
        for member in range(config.algorithm.group_size):
            replies = [int(n) for n in chance.integers(1, 9, 1 + member % 2)]
            runs = [len(prompt), replies[0], *(n for one in replies[1:] for n in (2, one))]
            sampled = sum(replies)
            old = int(chance.integers(0, sampled + 1)) if step else 0
            spans = ((old, step - 1), (sampled - old, step))
            members.append(
                Trajectory(
                    run_id="check",
                    group_id=GroupId(f"group-{step}-{group}"),
                    member=member,
                    attempt=0,
                    server_id=ServerId("server"),
                    server_epoch=1,
                    environment=environment,
                    task_index=group,
                    seed=0,
                    purpose=Purpose.TRAINING,
                    status=Status.TRUNCATED if chance.random() < 0.2 else Status.COMPLETED,
                    token_ids=np.append(prompt, chance.integers(0, VOCAB, sum(runs[1:]))).astype(
                        np.uint32
                    ),
                    run_lengths=tuple(runs),
                    behavior_logprobs=(
                        -np.log(VOCAB) + 0.3 * chance.standard_normal(sampled)
                    ).astype(np.float32),
                    version_spans=tuple(
                        VersionSpan(length, PolicyVersion(0, version))
                        for length, version in spans
                        if length
                    ),
                    reward=float(chance.normal()),
                    metrics=AnyMetrics(group * 16 + member),
                    num_turns=len(replies),
                )
            )
        groups.append(members)
    if is_permuted:
        # A mini-batch keeps its groups.
        groups = [groups[place][::-1] for place in (1, 0, 3, 2)]
    return Batch(step, "check", tuple(one for members in groups for one in members))


def _make_model(folder: Path, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(sizes).save_pretrained(folder)


if __name__ == "__main__":
    _train_all(
        load_config(Path(sys.argv[1]) / "config.toml"),
        Path(sys.argv[1]),
        json.loads(sys.argv[2]),
        rank=1,
    )
