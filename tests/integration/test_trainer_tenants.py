"""Clients with adapters of their own ranks are trained as each would be alone, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import tenant_ranks
from support.ranks.rank_pool import RankPool
from support.ranks.tenant_ranks import ALL, JOBS, LARGEST, LAYOUTS, TENANTS

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
    return rank_pool.found(tenant_ranks, JOBS, folder)


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_a_client_among_others_is_trained_bit_for_bit_as_alone(layout, name, found) -> None:
    ours = found[f"{layout} {ALL}"]["seen"][name]
    alone = found[f"{layout} {name}"]["seen"][name]
    assert ours["logprobs"] == alone["logprobs"]
    assert ours["norms"] == alone["norms"]
    for key in ("begun", "served"):
        assert same(ours[key], alone[key]), key
    for step, (mine, own) in enumerate(zip(ours["trained"], alone["trained"], strict=True)):
        assert same(mine, own), step
    assert not same(ours["trained"][0], ours["trained"][1])


@pytest.mark.parametrize("name", TENANTS)
def test_an_adapter_has_its_rank_and_matrices_alone(name: str, found: dict[str, dict]) -> None:
    tenant = TENANTS[name]
    adapted = {part for target in tenant.targets for part in PARTS[target]}
    for trained in found[f"one {ALL}"]["seen"][name]["trained"]:
        for key, tensor in trained.items():
            first = tensor if "lora_A" in key else tensor.T
            assert first.shape[0] == LARGEST
            is_used = key.split(".lora_")[0].rpartition(".")[2] in adapted
            rows = first.abs().amax(dim=1) > 0
            assert rows.tolist() == [is_used and row < tenant.rank for row in range(LARGEST)], key


def test_servers_get_what_a_client_has_published_with_its_factor(found: dict[str, dict]) -> None:
    for name, tenant in TENANTS.items():
        seen = found[f"one {ALL}"]["seen"][name]
        for key, served in seen["served"].items():
            scale = 1.0 if "lora_A" in key else tenant.alpha / tenant.rank
            assert torch.equal(served, seen["trained"][0][key] * scale)
        assert same(seen["served"], seen["whole served"])


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_files_have_a_clients_newest_values_at_its_rank_on_its_matrices(
    layout: str, folder: Path, found: dict[str, dict]
) -> None:
    for name, tenant in TENANTS.items():
        seen = found[f"{layout} {ALL}"]["seen"][name]
        path = folder / f"tenants-{layout}-{ALL}-adapters" / name
        settings = json.loads((path / "adapter_config.json").read_text())
        parts = sorted(part for target in tenant.targets for part in PARTS[target])
        told = settings["r"], settings["lora_alpha"], settings["target_modules"]
        assert told == (tenant.rank, tenant.alpha, parts)
        assert not same(seen["after"], seen["served"])
        own = {
            key: (tensor[: tenant.rank] if "lora_A" in key else tensor[:, : tenant.rank])
            for key, tensor in seen["after"].items()
            if key.split(".lora_")[0].rpartition(".")[2] in parts
        }
        assert same(load_file(path / "adapter_model.safetensors"), own)


def test_a_step_takes_gradients_that_are_held_by_their_passes_names(found: dict) -> None:
    for name in TENANTS:
        # The third step comes after a restart.
        assert found[f"one {ALL}"]["seen"][name]["by name"][:3] == [True, True, False]


def test_what_is_not_finite_fails_alone(found: dict[str, dict]) -> None:
    job = found[f"one {ALL}"]
    assert job["failures"]["loss"] == "the loss is -inf" or "inf" in job["failures"]["loss"]
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
    served = [{k: v for k, v in each.items() if "/trained/" not in k} for each in digests]
    assert served[0] != served[1] == served[2] == served[3]
