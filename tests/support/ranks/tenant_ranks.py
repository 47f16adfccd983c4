"""The program of ranks that train several clients' adapters in turn, or one of them alone.

What a job saw lies in FOLDER/JOB.pt afterwards, on rank 0. A job is a layout and a choice:
"LAYOUT all", or "LAYOUT NAME" for the same operations of that client only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from slipstream.core.settings.config import Config
from slipstream.protocol.codec import passes_digest
from slipstream.v1 import trainer_pb2 as pb

from support.ranks.parity_layouts import OVERLAP
from support.ranks.pass_ranks import LOSSES, passes_of
from support.ranks.rank_program import kept, opened, settings_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
    from slipstream.learner.trainer.model.policy import Policy

ALL, LARGEST, STEPS = "all", 64, 3
MATRICES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class Tenant:
    """A client's adapter, its loss and its first learning rate."""

    rank: int
    alpha: float
    loss: str
    rate: float
    seed: int = 0
    targets: tuple[str, ...] = MATRICES


TENANTS = {
    "a": Tenant(1, 32.0, "cross_entropy", 0.01),
    "b": Tenant(4, 8.0, "ppo", 0.02, targets=MATRICES[:2]),
    "c": Tenant(8, 32.0, "importance_sampling", 0.005, seed=7),
    "d": Tenant(64, 16.0, "dro", 0.01, targets=MATRICES[2:]),
    # Two that are equal but for their data.
    "e": Tenant(8, 32.0, "cispo", 0.01),
    "f": Tenant(8, 32.0, "cross_entropy", 0.01),
    "g": Tenant(16, 16.0, "ppo", 0.01, seed=3),
    "h": Tenant(32, 8.0, "importance_sampling", 0.02, targets=MATRICES[1:]),
}
# name -> (ranks, changes of sections, clients that are also run alone)
LAYOUTS: dict[str, tuple[int, dict[str, dict], str]] = {
    "one": (1, {}, "abcdefgh"),
    "tp2": (
        2,
        {"learner": {"parallel": {"tp": 2}, "transformer": {"sequence_parallel": False}}},
        "ad",
    ),
    "dp2-distributed-bfloat16": (2, {"learner": OVERLAP, "model": {"dtype": "bfloat16"}}, "bf"),
}
JOBS = {
    f"{layout} {name}": ranks
    for layout, (ranks, _, alone) in LAYOUTS.items()
    for name in (ALL, *alone)
}


def config_of(job: str, folder: Path) -> Config:
    layout, chosen = job.split()
    world_size, changes, _ = LAYOUTS[layout]
    names = list(TENANTS) if chosen == ALL else [chosen]
    own = {
        "learner": {"world_size": world_size},
        "lora": {"rank": LARGEST, "adapters": names, "publish": "adapters"},
        "controller": {"client_loop": True},
    }
    return settings_of(folder / "llama", own, changes)


def adapter(name: str) -> pb.Adapter:
    return pb.Adapter(name=name, rank=TENANTS[name].rank, alpha=TENANTS[name].alpha)


def own_passes(name: str, step: int) -> list[pb.Pass]:
    found = passes_of(TENANTS[name].loss, 10 * step + ord(name))
    for one in found:
        one.adapter.CopyFrom(adapter(name))
    return found


def numbers_of(name: str, step: int) -> pb.AdamNumbers:
    rate = TENANTS[name].rate / (step + 1)
    decay = 0.1 if name in "bd" else 0.0
    return pb.AdamNumbers(
        learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=decay, max_grad_norm=1.0
    )


def factors_of(policy: Policy, name: str, *, published: bool = False) -> dict[str, torch.Tensor]:
    """The factors of an adapter, those that are trained or those that servers get."""
    from slipstream.learner.trainer.weights.export import adapter_tensors

    adapters = policy.adapters
    with adapters.published(name) if published else adapters.active(name):
        return {key: tensor.clone() for key, tensor in adapter_tensors(policy, torch.float32)}


def run_rank(folder: Path, job: str) -> None:
    from slipstream.core.errors import UntrainableBatch
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.passes import Passes
    from slipstream.learner.trainer.weights.export import save_adapters
    from slipstream.learner.trainer.weights.publish import open_published

    from support.ranks.lora_ranks import save

    config = config_of(job, folder)
    policy = opened(config)
    names = policy.adapters.names
    disk = DiskWork(folder, policy.ranks)
    path = folder / f"tenants-{job.replace(' ', '-')}-checkpoint"

    def load(step: int, models: Sequence[StoredModel]) -> None:
        load_models(models, path, disk)

    passes = Passes(policy, config, load)
    published = open_published(policy, config)
    seen: dict[str, dict] = {name: {"logprobs": [], "norms": [], "trained": []} for name in names}

    def order(name: str, given: pb.GivenStep, of: Sequence[pb.Pass] = ()) -> dict[str, float]:
        given.adapter.CopyFrom(adapter(name))
        return passes.run(Batch(0, "b", (), given, tuple(of))).metrics

    def step(name: str, number: int) -> None:
        adam, of = pb.GivenStep(adam=numbers_of(name, number)), own_passes(name, number)
        if passes_digest(name, [one.id for one in of]) in passes.held():
            # The controller sends their names alone then.
            of = [pb.Pass(id=one.id) for one in of]
        seen[name]["norms"].append(order(name, adam, of)["grad_norm"])
        seen[name].setdefault("by name", []).append(not of[0].sequences)
        seen[name]["trained"].append(factors_of(policy, name))

    for name in names:
        tenant = TENANTS[name]
        order(name, pb.GivenStep(begin=pb.NewAdapter(seed=tenant.seed, targets=tenant.targets)))
        seen[name]["begun"] = factors_of(policy, name)
    digests = [published.digests().by_name]
    failures = {}
    for number in range(STEPS):
        if number == STEPS - 1:
            save(stored_policy(policy), path, disk)
        for place in range(2):
            for name in names:
                report = passes.compute(own_passes(name, number)[place])
                assert not report.error, report.error
                seen[name]["logprobs"].append(list(report.logprobs))
        if number == 1 and "c" in names:
            # One client's data have a loss, and gradients, that are not finite.
            bad = own_passes("c", number)[0]
            bad.id = "bad"
            bad.sequences[0].advantages = np.full(7, np.inf, "<f4").tobytes()
            failures["loss"] = passes.compute(bad).error
            bad.id, bad.loss, bad.loss_args_json = "huge", *("reinforce", "{}")
            bad.sequences[0].advantages = np.full(7, 3e37, "<f4").tobytes()
            failures["huge"] = passes.compute(bad).error
            try:
                order("c", pb.GivenStep(adam=numbers_of("c", number)), [bad])
            except UntrainableBatch as fault:
                failures["gradient"] = str(fault)
            for one in own_passes("c", number):
                passes.compute(one)
        if number == 2:
            # A restart has lost the gradients.
            passes = Passes(policy, config, load)
        for name in reversed(names):
            step(name, number)
        if number == 0:
            for name in names:
                order(name, pb.GivenStep(serve=pb.ServedAdapter()))
        digests.append(published.digests().by_name)
    for name in names:
        seen[name]["served"] = factors_of(policy, name, published=True)
    # Two clients go back to the checkpoint, one with and one without Adam's moments; another one
    # takes over the state of a client of its rank.
    for name, source in (("c", "c"), ("e", "e"), ("f", "e")):
        if name in names and source in names:
            state = pb.LoadedState(step=1, adapter=source, without_optimizer=name == "e")
            order(name, pb.GivenStep(load=state))
            seen[name]["loaded"] = factors_of(policy, name)
    for name in names:
        seen[name]["after"] = factors_of(policy, name)
    save_adapters(policy, config, folder / f"tenants-{job.replace(' ', '-')}-adapters")
    if "c" in names:
        step("c", STEPS - 1)
    load_models(stored_policy(policy), path, disk)
    for name in names:
        seen[name]["whole"] = factors_of(policy, name)
        seen[name]["whole served"] = factors_of(policy, name, published=True)
    kept(
        policy,
        {"seen": seen, "failures": failures, "digests": digests, "loss": sorted(LOSSES)},
        folder / f"{job}.pt",
    )
