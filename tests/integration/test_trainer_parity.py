"""Every parallel layout trains like one rank, and one rank like plain transformers and torch.

The ranks of a world size are started once and go through all layouts; this file is their program.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from fake_controller import make_batch
from slipstream.client.preflight import free_port
from slipstream.learner.trainer.batch import Batch, token_lags
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
        "importance_cap": 1.2,
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
# name -> (world size, model, settings of the learner and the algorithm)
LAYOUTS: dict[str, tuple[int, str, dict]] = {
    "one": (1, "llama", {}),
    "one-mini-batches": (1, "llama", {"algorithm": {"mini_batches": 2}}),
    "one-no-cap": (1, "llama", {"algorithm": {"importance_cap": 0.0}}),
    "one-qwen3": (1, "qwen3", {}),
    "dp2": (2, "llama", {"learner": {}}),
    "dp2-distopt": (2, "llama", {"learner": {"use_distributed_optimizer": True}}),
    "dp2-mini-batches": (2, "llama", {"algorithm": {"mini_batches": 2}}),
    "tp2": (2, "llama", {"learner": {"parallel": {"tp": 2}}}),
    "tp2-sp": (2, "llama", {"learner": {"parallel": {"tp": 2, "sequence_parallel": True}}}),
    "tp2-sp-qwen3": (2, "qwen3", {"learner": {"parallel": {"tp": 2, "sequence_parallel": True}}}),
    "pp2": (2, "llama", {"learner": {"parallel": {"pp": 2}}}),
    "pp2-vpp2": (2, "llama", {"learner": {"parallel": {"pp": 2, "vpp": 2}}}),
    "pp2-tied": (2, "tied", {"learner": {"parallel": {"pp": 2}}}),
    "dp2-overlap": (
        2,
        "llama",
        {
            "learner": {
                "use_distributed_optimizer": True,
                "ddp": {
                    "overlap_grad_reduce": True,
                    "overlap_param_gather": True,
                    "bucket_size": 20000,
                },
            }
        },
    ),
    "tp2-sp-recompute": (
        2,
        "llama",
        {
            "learner": {
                "parallel": {"tp": 2, "sequence_parallel": True},
                "transformer": {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
            }
        },
    ),
    "one-tied": (1, "tied", {}),
    "one-overflow": (1, "llama", {"algorithm": {"learning_rate": 1e30}}),
    "tp2-sp-dp2-distopt": (
        4,
        "llama",
        {
            "learner": {
                "parallel": {"tp": 2, "sequence_parallel": True},
                "use_distributed_optimizer": True,
            }
        },
    ),
    "tp2-sp-pp2-vpp2": (
        4,
        "llama",
        {"learner": {"parallel": {"tp": 2, "sequence_parallel": True, "pp": 2, "vpp": 2}}},
    ),
    "dp2-pp2-tied": (4, "tied", {"learner": {"parallel": {"pp": 2}}}),
}


def layouts_of(world_size: int) -> list[str]:
    return [
        name
        for name, (size, _, _) in LAYOUTS.items()
        if size == world_size and name != "one-overflow"
    ]


def config_of(layout: str, model: Path) -> Config:
    world_size, _, changes = LAYOUTS[layout]
    table = json.loads(json.dumps(SETTINGS))
    for section, values in changes.items():
        table[section] |= values
    table["learner"]["world_size"] = world_size
    table["model"]["path"] = str(model)
    return parse_config(table, source=layout)


def batches() -> list[Batch]:
    return [
        make_batch(step, num_groups=4, group_size=4, vocab_size=VOCAB, max_tokens=40)
        for step in range(STEPS)
    ]


def probe() -> list[np.ndarray]:
    return [trajectory.token_ids for trajectory in batches()[0].trajectories[:6]]


def make_models(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
    torch.manual_seed(0)
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
        "tied": LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, **rope, tie_word_embeddings=False)),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, dict]:
    return run_world(1, folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict[str, dict]:
    return run_world(2, folder)


@pytest.fixture(scope="module")
def four_ranks(folder: Path) -> dict[str, dict]:
    return run_world(4, folder)


def run_world(world_size: int, folder: Path) -> dict[str, dict]:
    """Runs all layouts of a world size in one set of processes."""
    layouts = [name for name, (size, _, _) in LAYOUTS.items() if size == world_size]
    ports = [str(free_port("127.0.0.1")) for _ in layouts]
    processes, logs = [], [folder / f"world-{world_size}-rank-{r}.log" for r in range(world_size)]
    for rank, path in enumerate(logs):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        jobs = map("=".join, zip(layouts, ports, strict=True))
        with path.open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(folder), *jobs],
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = wait_for_all(processes, limit_s=500)
    finally:
        for process in processes:
            process.kill()
    said = "".join(
        f"rank {rank} exited with {code}: {path.read_text()[-4000:]}\n"
        for rank, (code, path) in enumerate(zip(codes, logs, strict=True))
    )
    assert codes == [0] * world_size, said
    return {name: torch.load(folder / f"{name}.pt", weights_only=True) for name in layouts}


def wait_for_all(processes: list[subprocess.Popen[bytes]], *, limit_s: float) -> list[int | None]:
    """Exit codes when all have ended, one has failed (others would wait for it), or too late."""
    until = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > until:
            return codes
        time.sleep(0.1)


def run_rank(folder: Path, jobs: list[str]) -> None:
    from slipstream.learner.trainer.export import hf_tensors, save_hf_folder
    from slipstream.learner.trainer.model import open_policy
    from slipstream.learner.trainer.parallel import Launch
    from slipstream.learner.trainer.schedule import sequence_logprobs
    from slipstream.learner.trainer.step import TrainingStep

    for job in jobs:
        layout, os.environ["MASTER_PORT"] = job.split("=")
        config = config_of(layout, folder / LAYOUTS[layout][1])
        policy = open_policy(config, Launch.from_environment())
        step = TrainingStep(policy, config)
        if layout == "one-overflow":
            torch.save(overflow(policy, step), folder / f"{layout}.pt")
            policy.ranks.close()
            continue
        finalized = count_finalizations(policy)
        before = {n: t.clone() for n, t in hf_tensors(policy, torch.float32)}
        metrics, logprobs = [], []
        for batch in batches():
            found = sequence_logprobs(policy, probe(), max_tokens=64)
            logprobs.append(torch.from_numpy(np.concatenate(found)))
            metrics.append(step.run(batch).metrics)
        found = sequence_logprobs(policy, probe(), max_tokens=64)
        logprobs.append(torch.from_numpy(np.concatenate(found)))
        weights = {n: t.clone() for n, t in hf_tensors(policy, torch.float32)}
        save_hf_folder(policy, config.model.path, folder / f"{layout}-final")
        if policy.ranks.is_main:
            result = {
                "metrics": metrics,
                "logprobs": logprobs,
                "before": before,
                "weights": weights,
                "finalizations": len(finalized),
            }
            torch.save(result, folder / f"{layout}.pt")
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


class Plain:
    """The same algorithm on transformers and torch: one trajectory at a time, unpacked."""

    def __init__(self, path: Path, config: Config) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-3,
        )

    def logprobs(self, token_ids: np.ndarray, temperature: float) -> torch.Tensor:
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        logits = self.model(ids).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]

    def probe(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([self.logprobs(token_ids, 1.0) for token_ids in probe()])

    def step(self, batch: Batch) -> dict[str, float]:
        algorithm = self.config.algorithm
        rewards: dict[str, list[float]] = {}
        for t in batch.trajectories:
            rewards.setdefault(t.group_id, []).append(t.reward)
        groups = list(rewards)
        share = len(groups) // algorithm.mini_batches
        totals, norms, old = [], [], {}
        for t in batch.trajectories:
            with torch.no_grad():
                old[t.trajectory_id] = self.logprobs(t.token_ids, 0.8)
        rate = 1e-3 * min(1.0, (batch.step + 1) / 2)
        for start in range(0, len(groups), share):
            members = [t for t in batch.trajectories if t.group_id in groups[start : start + share]]
            mean = sum(t.num_sampled_tokens for t in members)
            total = torch.zeros(())
            for t in members:
                group = np.array(rewards[t.group_id])
                advantage = (t.reward - group.mean()) / (group.std() + 1e-6)
                mask = torch.from_numpy(t.sampled_mask())[1:]
                behavior = torch.from_numpy(t.behavior_logprobs.copy())
                policy = self.logprobs(t.token_ids, 0.8)[mask]
                before = old[t.trajectory_id][mask]
                if algorithm.importance_cap:
                    weight = (before - behavior).exp().clamp(max=algorithm.importance_cap)
                    ratio = (policy - before).exp()
                else:
                    weight, ratio = 1.0, (policy - behavior).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                total = total - (weight * surrogate).sum()
            self.optimizer.zero_grad()
            (total / mean).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item())
            for param_group in self.optimizer.param_groups:
                param_group["lr"] = rate
            self.optimizer.step()
            totals.append((total.item(), mean))
        return {
            "loss": sum(a for a, _ in totals) / sum(b for _, b in totals),
            "grad_norm": sum(norms) / len(norms),
        }


@pytest.mark.parametrize("layout", layouts_of(1))
def test_one_rank_trains_like_plain_transformers(
    layout: str, folder: Path, one_rank: dict[str, dict]
) -> None:
    model = folder / LAYOUTS[layout][1]
    plain = Plain(model, config_of(layout, model))
    found = one_rank[layout]
    torch.testing.assert_close(found["logprobs"][0], plain.probe(), rtol=1e-5, atol=1e-5)
    for step, batch in enumerate(batches()):
        expected = plain.step(batch)
        for name, value in expected.items():
            assert found["metrics"][step][name] == pytest.approx(value, rel=1e-5, abs=2e-6), (
                step,
                name,
            )
    torch.testing.assert_close(found["logprobs"][-1], plain.probe(), rtol=1e-5, atol=2e-5)
    trained = plain.model.state_dict()
    for name, tensor in found["weights"].items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", layouts_of(2))
def test_two_ranks_train_like_one(
    layout: str, one_rank: dict[str, dict], two_ranks: dict[str, dict]
) -> None:
    check_layout(layout, one_rank, two_ranks[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts_of(4))
def test_four_ranks_train_like_one(
    layout: str, folder: Path, one_rank: dict[str, dict], four_ranks: dict[str, dict]
) -> None:
    check_layout(layout, one_rank, four_ranks[layout])


def check_layout(layout: str, one_rank: dict[str, dict], found: dict) -> None:
    suffix = {"llama": "", "tied": "-tied", "qwen3": "-qwen3"}[LAYOUTS[layout][1]]
    suffix += "-mini-batches" if "mini-batches" in layout else ""
    expected = one_rank["one" + suffix]
    for name, tensor in expected["before"].items():
        assert torch.equal(found["before"][name], tensor), name
    for step in range(STEPS):
        ours, theirs = found["metrics"][step], expected["metrics"][step]
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "kl",
            "logprob_gap_mean",
            "logprob_gap_max",
            "importance_weight_mean",
            "trained_tokens",
            "logprob_gap_tokens",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), (step, name)
        torch.testing.assert_close(
            found["logprobs"][step], expected["logprobs"][step], rtol=1e-5, atol=2e-5
        )


@pytest.mark.parametrize("layout", ["one", "one-tied", "one-qwen3"])
def test_exported_folder_has_the_models_logits(
    layout: str, folder: Path, one_rank: dict[str, dict]
) -> None:
    plain = Plain(folder / f"{layout}-final", config_of(layout, folder))
    torch.testing.assert_close(
        plain.probe(), one_rank[layout]["logprobs"][-1], rtol=1e-5, atol=1e-5
    )


def test_a_load_brings_every_tensor_of_the_folder_unchanged(
    folder: Path, one_rank: dict[str, dict]
) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "llama" / "model.safetensors")
    assert set(stored) == set(one_rank["one"]["before"])
    assert all(torch.equal(one_rank["one"]["before"][name], stored[name]) for name in stored)


def test_statistics_are_those_of_the_batch(one_rank: dict[str, dict]) -> None:
    for step, batch in enumerate(batches()):
        metrics = one_rank["one"]["metrics"][step]
        assert metrics["trained_tokens"] == sum(t.num_sampled_tokens for t in batch.trajectories)
        fresh = sum(int((token_lags(t, step) == 0).sum()) for t in batch.trajectories)
        assert metrics["logprob_gap_tokens"] == fresh
        assert metrics["clip_fraction"] == 0.0
        assert metrics["learning_rate"] == pytest.approx([5e-4, 1e-3, 1e-3][step])


def test_gradients_are_finalized_once_for_each_mini_batch(one_rank: dict[str, dict]) -> None:
    assert one_rank["one"]["finalizations"] == STEPS
    assert one_rank["one-mini-batches"]["finalizations"] == 2 * STEPS
    assert one_rank["one"]["metrics"][0]["num_micro_batches"] > 1


def test_step_that_is_not_finite_stops_before_the_weights_change(
    one_rank: dict[str, dict],
) -> None:
    error = one_rank["one-overflow"]["error"]
    assert re.fullmatch(r"the .* is (nan|inf); the weights were not changed", error)
    assert one_rank["one-overflow"]["is_same"]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2:])
