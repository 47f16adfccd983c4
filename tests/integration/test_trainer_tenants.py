"""Clients with adapters of their own ranks are trained as each would be alone, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.settings.config import Config
from slipstream.protocol.codec import passes_digest
from slipstream.v1 import trainer_pb2 as pb
from support.ranks.parity_layouts import OVERLAP
from support.ranks.pass_ranks import LOSSES, passes_of
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import kept, opened, settings_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
    from slipstream.learner.trainer.model.policy import Policy

ALL = "all"
LARGEST = 64
STEPS = 3
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
        {
            "learner": {
                "parallel": {"tp": 2},
                "transformer": {"sequence_parallel": False},
            }
        },
        "ad",
    ),
    "dp2-distributed-bfloat16": (
        2,
        {"learner": OVERLAP, "model": {"dtype": "bfloat16"}},
        "bf",
    ),
}
JOBS = {
    f"{layout} {name}": ranks
    for layout, (ranks, _, alone) in LAYOUTS.items()
    for name in (ALL, *alone)
}


def config_of(job: str, folder: Path) -> Config:
    layout, tenant = job.split()
    world_size, changes, _ = LAYOUTS[layout]
    names = list(TENANTS) if tenant == ALL else [tenant]
    settings = {
        "learner": {"world_size": world_size},
        "lora": {"rank": LARGEST, "adapters": names, "publish": "adapters"},
        "controller": {"client_loop": True},
    }
    return settings_of(folder / "llama", settings, changes)


def adapter(name: str) -> pb.Adapter:
    return pb.Adapter(name=name, rank=TENANTS[name].rank, alpha=TENANTS[name].alpha)


def own_passes(name: str, step: int) -> list[pb.Pass]:
    passes = passes_of(TENANTS[name].loss, 10 * step + ord(name))
    for sent_pass in passes:
        sent_pass.adapter.CopyFrom(adapter(name))
    return passes


def numbers_of(name: str, step: int) -> pb.AdamNumbers:
    rate = TENANTS[name].rate / (step + 1)
    decay = 0.1 if name in "bd" else 0.0
    return pb.AdamNumbers(
        learning_rate=rate,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=decay,
        max_grad_norm=1.0,
    )


def factors_of(
    policy: Policy, name: str, *, published: bool = False
) -> dict[str, torch.Tensor]:
    """The factors of an adapter, those that are trained or those that servers get."""
    from slipstream.learner.trainer.weights.export import adapter_tensors

    adapters = policy.adapters
    with adapters.published(name) if published else adapters.active(name):
        return {
            key: tensor.clone()
            for key, tensor in adapter_tensors(policy, torch.float32)
        }


def run_rank(folder: Path, job: str) -> None:
    """A rank's part of a job, "LAYOUT all" or "LAYOUT NAME": that client's operations only."""
    from slipstream.core.errors import UntrainableBatch
    from slipstream.learner.trainer.batches.batch import Batch
    from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models
    from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
    from slipstream.learner.trainer.passes import Passes
    from slipstream.learner.trainer.weights.export import save_adapters
    from slipstream.learner.trainer.weights.run_chat import RunChat
    from slipstream.learner.trainer.weights.weight_publisher import open_published
    from support.ranks.lora_ranks import save

    config = config_of(job, folder)
    policy = opened(config)
    names = policy.adapters.names
    disk = DiskWork(folder, policy.ranks)
    path = folder / f"tenants-{job.replace(' ', '-')}-checkpoint"

    def load(step: int, models: Sequence[StoredModel]) -> None:
        load_models(models, path, disk)

    def load_nothing() -> None:
        raise AssertionError("each adapter begins by itself")

    passes = Passes(policy, load, load_nothing)
    published = open_published(policy, config)
    seen: dict[str, dict] = {
        name: {"logprobs": [], "norms": [], "trained": []} for name in names
    }

    def order(
        name: str, given: pb.GivenStep, of: Sequence[pb.Pass] = ()
    ) -> dict[str, float]:
        given.adapter.CopyFrom(adapter(name))
        return passes.run(Batch(0, "b", (), given, tuple(of))).metrics

    def step(name: str, number: int) -> None:
        adam = pb.GivenStep(adam=numbers_of(name, number))
        of = own_passes(name, number)
        if passes_digest(name, [sent_pass.id for sent_pass in of]) in passes.held():
            # The controller sends their names alone then.
            of = [pb.Pass(id=sent_pass.id) for sent_pass in of]
        seen[name]["norms"].append(order(name, adam, of)["grad_norm"])
        seen[name].setdefault("by name", []).append(not of[0].sequences)
        seen[name]["trained"].append(factors_of(policy, name))

    for name in names if len(names) > 1 else ():
        # An earlier client has trained in this client's place.
        tenant = TENANTS[name]
        stranger = pb.NewAdapter(seed=tenant.seed + 1, targets=tenant.targets)
        order(name, pb.GivenStep(begin=stranger))
        for micro_batch in own_passes(name, 0):
            assert not passes.compute(micro_batch).error
        order(name, pb.GivenStep(adam=numbers_of(name, 0)), own_passes(name, 0))
    for name in names:
        tenant = TENANTS[name]
        order(
            name,
            pb.GivenStep(begin=pb.NewAdapter(seed=tenant.seed, targets=tenant.targets)),
        )
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
            # A single client's data have a loss, and gradients, that are not finite.
            bad = own_passes("c", number)[0]
            bad.id = "bad"
            bad.sequences[0].advantages = np.full(7, np.inf, "<f4").tobytes()
            failures["loss"] = passes.compute(bad).error
            bad.id = "huge"
            bad.loss = "reinforce"
            bad.loss_args_json = "{}"
            bad.sequences[0].advantages = np.full(7, 3e37, "<f4").tobytes()
            failures["huge"] = passes.compute(bad).error
            try:
                order("c", pb.GivenStep(adam=numbers_of("c", number)), [bad])
            except UntrainableBatch as fault:
                failures["gradient"] = str(fault)
            for own_pass in own_passes("c", number):
                passes.compute(own_pass)
        if number == 2:
            # A restart has lost the gradients.
            passes = Passes(policy, load, load_nothing)
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
            state = pb.LoadedState(
                step=1, adapter=source, without_optimizer=name == "e"
            )
            order(name, pb.GivenStep(load=state))
            seen[name]["loaded"] = factors_of(policy, name)
    for name in names:
        seen[name]["after"] = factors_of(policy, name)
    save_adapters(
        policy, config, folder / f"tenants-{job.replace(' ', '-')}-adapters", RunChat()
    )
    if "c" in names:
        step("c", STEPS - 1)
    load_models(stored_policy(policy), path, disk)
    for name in names:
        seen[name]["whole"] = factors_of(policy, name)
        seen[name]["whole served"] = factors_of(policy, name, published=True)
    kept(
        policy,
        {
            "seen": seen,
            "failures": failures,
            "digests": digests,
            "loss": sorted(LOSSES),
        },
        folder / f"{job}.pt",
    )


PARTS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
PAIRS = [(layout, name) for layout, (_, _, alone) in LAYOUTS.items() for name in alone]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    return rank_pool.found(__file__, JOBS, folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[n], theirs[n]) for n in ours
    )


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_a_client_among_others_is_trained_bit_for_bit_as_alone(
    layout, name, found
) -> None:
    ours = found[f"{layout} {ALL}"]["seen"][name]
    alone = found[f"{layout} {name}"]["seen"][name]
    assert ours["logprobs"] == alone["logprobs"]
    assert ours["norms"] == alone["norms"]
    for key in ("begun", "served"):
        assert same(ours[key], alone[key]), key
    for step, (our_step, own_step) in enumerate(
        zip(ours["trained"], alone["trained"], strict=True)
    ):
        assert same(our_step, own_step), step
    assert not same(ours["trained"][0], ours["trained"][1])


@pytest.mark.parametrize("name", TENANTS)
def test_an_adapter_has_its_rank_and_matrices_alone(
    name: str, found: dict[str, dict]
) -> None:
    tenant = TENANTS[name]
    adapted = {part for target in tenant.targets for part in PARTS[target]}
    for trained in found[f"one {ALL}"]["seen"][name]["trained"]:
        for key, tensor in trained.items():
            first = tensor if "lora_A" in key else tensor.T
            assert first.shape[0] == LARGEST
            is_used = key.split(".lora_")[0].rpartition(".")[2] in adapted
            rows = first.abs().amax(dim=1) > 0
            assert rows.tolist() == [
                is_used and row < tenant.rank for row in range(LARGEST)
            ], key


def test_servers_get_what_a_client_has_published_with_its_factor(
    found: dict[str, dict],
) -> None:
    for name, tenant in TENANTS.items():
        seen = found[f"one {ALL}"]["seen"][name]
        for key, served in seen["served"].items():
            scale = 1.0 if "lora_A" in key else tenant.alpha / tenant.rank
            assert torch.equal(served, seen["trained"][0][key] * scale)
        assert same(seen["served"], seen["whole served"])


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_files_have_a_clients_newest_values_at_its_rank_on_its_matrices(
    layout, folder, found
):
    for name, tenant in TENANTS.items():
        seen = found[f"{layout} {ALL}"]["seen"][name]
        path = folder / f"tenants-{layout}-{ALL}-adapters" / name
        settings = json.loads((path / "adapter_config.json").read_text())
        parts = sorted(part for target in tenant.targets for part in PARTS[target])
        adapter_facts = (
            settings["r"],
            settings["lora_alpha"],
            settings["target_modules"],
        )
        assert adapter_facts == (tenant.rank, tenant.alpha, parts)
        assert not same(seen["after"], seen["served"])
        own = {
            key: (
                tensor[: tenant.rank] if "lora_A" in key else tensor[:, : tenant.rank]
            )
            for key, tensor in seen["after"].items()
            if key.split(".lora_")[0].rpartition(".")[2] in parts
        }
        assert same(load_file(path / "adapter_model.safetensors"), own)


def test_a_step_takes_gradients_that_are_held_by_their_passes_names(
    found: dict,
) -> None:
    for name in TENANTS:
        # The third step comes after a restart.
        assert found[f"one {ALL}"]["seen"][name]["by name"][:3] == [True, True, False]


def test_what_is_not_finite_fails_alone(found: dict[str, dict]) -> None:
    job = found[f"one {ALL}"]
    assert (
        job["failures"]["loss"] == "the loss is -inf"
        or "inf" in job["failures"]["loss"]
    )
    assert job["failures"]["huge"] == ""
    assert "the gradient norm is" in job["failures"]["gradient"]


def test_a_client_loads_its_state_and_no_other_changes(found: dict[str, dict]) -> None:
    seen = found[f"one {ALL}"]["seen"]
    for name, source in (("c", "c"), ("e", "e"), ("f", "e")):
        assert same(seen[name]["loaded"], seen[source]["trained"][1])
    for name in "abd":
        assert same(seen[name]["after"], seen[name]["trained"][2])
    # With the moments of Adam the step is the same again.
    assert same(seen["c"]["trained"][3], seen["c"]["trained"][2])
    for name in TENANTS:
        assert same(seen[name]["whole"], seen[name]["trained"][1])


def test_a_version_tells_the_changes_of_each_client(found: dict[str, dict]) -> None:
    digests = found[f"one {ALL}"]["digests"]
    for before, after in zip(digests, digests[1:], strict=False):
        for name in TENANTS:
            keys = [key for key in before if key.startswith(f"{name}/trained/")]
            assert any(before[key] != after[key] for key in keys)
    served = [
        {k: v for k, v in digest.items() if "/trained/" not in k} for digest in digests
    ]
    assert served[0] != served[1] == served[2] == served[3]
