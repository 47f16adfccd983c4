"""Adapters train alike in every layout, and what is exported is what was trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.ranks import lora_ranks
from support.ranks.lora_ranks import (
    ALPHA,
    EXPERTS,
    JOBS,
    MIXTURES,
    OTHERS_CHECKPOINT,
    RANK,
    config_of,
)
from support.ranks.parity_layouts import STEPS, batches, probe
from support.ranks.rank_pool import RankPool, chosen_jobs, each_job, jobs_of_file
from transformers import AutoModelForCausalLM

SCALE = ALPHA / RANK
SLOW = ("experts-tp2-ep2", "next-tp2", "cp2-qwen35")
# A layer for each stage of a pipeline, and a dense one before one with experts.
NUM_LAYERS = 2
# Matrices of the four targets in all layers.
NUM_ADAPTED = NUM_LAYERS * 7


pytestmark = [pytest.mark.long_but("one"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(
    folder: Path, rank_pool: RankPool, request: pytest.FixtureRequest
) -> dict[str, dict]:
    """What rank 0 of each job saw."""
    other_jobs = chosen_jobs(request, MIXTURES | EXPERTS)
    jobs = dict.fromkeys(
        [*jobs_of_file(request, JOBS), *map(reference, other_jobs), *other_jobs]
    )
    sizes = {job: lora_ranks.ALL[job][0] for job in jobs}
    return rank_pool.found(lora_ranks, sizes, folder, "lora-{}.pt")


def reference(job: str) -> str:
    """The job of one rank with the same model; a mixture without adapters of experts has none."""
    if job in EXPERTS:
        return f"{job.split('-')[0]}-one"
    model = lora_ranks.ALL[job][1]
    return "one" if model == "llama" else job if job in MIXTURES else f"one-{model}"


@pytest.mark.parametrize(
    "job", each_job([job for job in JOBS | EXPERTS if job != reference(job)], SLOW)
)
def test_adapters_train_alike_in_every_layout(job, folder, found):
    check_alike(found[job], found[reference(job)])
    ours, other = (
        load_file(folder / f"lora-{case}-first" / "adapter_model.safetensors")
        for case in (job, reference(job))
    )
    assert set(ours) == set(other)
    assert all(torch.equal(ours[name], tensor) for name, tensor in other.items())


def check_alike(ours: dict, theirs: dict) -> None:
    for step in range(STEPS):
        for name in ("loss", "grad_norm", "entropy", "kl"):
            expected = pytest.approx(theirs["metrics"][step][name], rel=1e-5, abs=2e-6)
            assert ours["metrics"][step][name] == expected, (step, name)
        torch.testing.assert_close(
            ours["logprobs"][step], theirs["logprobs"][step], rtol=1e-5, atol=2e-5
        )
    for name, tensor in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("job", ["one", "tp2", "pp2-tied"])
def test_adapters_begin_without_effect_and_move_only_their_matrices(job, folder, found):
    stored = load_file(folder / JOBS[job][1] / "model.safetensors")
    assert all(torch.equal(found[job]["before"][name], stored[name]) for name in stored)
    moved = [
        n for n, t in found[job]["weights"].items() if not torch.equal(t, stored[n])
    ]
    assert len(moved) == NUM_ADAPTED
    assert all(name.endswith("_proj.weight") for name in moved)


def test_only_adapters_have_optimizer_state(found: dict[str, dict]) -> None:
    # hidden 64, intermediate 96, 4 heads and 2 pairs of keys and values of 16.
    sizes = [(64, 128), (64, 64), (64, 192), (96, 64)]
    elements = NUM_LAYERS * sum(RANK * (inputs + outputs) for inputs, outputs in sizes)
    assert found["one"]["trained_elements"] == elements
    assert found["one"]["state_elements"] == 2 * elements
    assert found["dp2-distributed"]["state_elements"] == 2 * elements // 2
    assert found["tp2"]["state_elements"] == 2 * elements // 2


def test_first_gradient_is_that_of_the_whole_matrix_seen_through_the_adapter(
    folder, found
):
    config = config_of("one", folder)
    gradients = whole_gradients(folder / "llama", config)
    first = load_file(folder / "lora-one-first" / "adapter_model.safetensors")
    squares = 0.0
    for name, gradient in gradients.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in first:
            # B is 0, so A has no gradient yet, and B has alpha / rank * dW A^T.
            squares += (
                (SCALE * gradient @ first[f"{prefix}.lora_A.weight"].T)
                .square()
                .sum()
                .item()
            )
    assert squares > 0
    assert found["one"]["metrics"][0]["grad_norm"] == pytest.approx(
        squares**0.5, rel=1e-5
    )


def whole_gradients(path: Path, config: object) -> dict[str, torch.Tensor]:
    """Gradient of each weight in the first step (all ratios are 1), by transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = batches(config)[0]
    rewards: dict[str, list[float]] = {}
    for t in batch.trajectories:
        rewards.setdefault(t.group_id, []).append(t.reward)
    total = torch.zeros(())
    for t in batch.trajectories:
        group = np.array(rewards[t.group_id])
        advantage = (t.reward - group.mean()) / (group.std() + 1e-6)
        policy = target_logprobs(model, t.token_ids, 0.8)[
            torch.from_numpy(t.sampled_mask())[1:]
        ]
        gap = policy.detach() - torch.from_numpy(t.behavior_logprobs.copy())
        total = total - (gap.exp().clamp(max=1.2) * advantage * policy).sum()
    (total / sum(t.num_sampled_tokens for t in batch.trajectories)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def target_logprobs(
    model: torch.nn.Module, token_ids: np.ndarray, temperature: float
) -> torch.Tensor:
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    logits = model(ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("job", ["one"])
def test_an_export_that_ends_early_has_written_adapters_and_hinders_no_other(
    job, folder, found
):
    assert found[job]
    assert (folder / f"lora-{job}-cut-adapters" / "adapter_model.safetensors").exists()
    assert not (folder / f"lora-{job}-cut").exists()


# Ranks that send: what a pipeline stage or an expert parallel rank holds comes from it.
SENDERS = {"pp2-tied": [0, 1], "ep2-moe": [0, 1]}


def sent(job: str, folder: Path) -> list[dict]:
    """What each rank sends in a run with `lora.publish = "adapters"`."""
    ranks = range((JOBS | MIXTURES)[job][0])
    return [
        torch.load(folder / f"lora-{job}-sent-{rank}.pt", weights_only=True)
        for rank in ranks
    ]


@pytest.mark.parametrize("job", list(JOBS))
def test_matrices_and_adapters_that_are_sent_apart_are_those_of_the_files(
    job, folder, found
):
    check_sent(job, folder, load_file(folder / JOBS[job][1] / "model.safetensors"))


@pytest.mark.parametrize("job", MIXTURES)
def test_ranks_that_hold_no_adapters_take_part_when_these_are_sent_alone(
    job, folder, found
):
    check_sent(job, folder, found[job]["before"])
    holding = [bool(rank["alone"]["tensors"]) for rank in sent(job, folder)]
    assert any(holding)
    assert not all(holding)


def check_sent(job: str, folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """`stored`: all weights before the first step."""
    ranks = sent(job, folder)
    adapters = load_file(folder / f"lora-{job}-adapters" / "adapter_model.safetensors")
    for rank in ranks:
        # No plan covers the rows of a delta net.
        is_planned = "qwen35" not in job
        assert (
            rank["kinds"] == ["PlannedFilling" if is_planned else "BridgeFilling"] * 2
        )
        assert rank["senders"] == SENDERS.get(job, [0])
        # Facts that a publish that begins with its order says beforehand.
        assert rank["announced"] == rank["alone"]["buckets"]
        assert rank["alone"]["scale"] == rank["whole"]["scale"] == SCALE
        assert sorted(rank["alone"]["adapters"]) == sorted(adapters)
    whole_tensors = {
        n: t for rank in ranks for n, t in rank["whole"]["tensors"].items()
    }
    alone = {n: t for rank in ranks for n, t in rank["alone"]["tensors"].items()}
    assert set(alone) == set(adapters)
    assert all(torch.equal(alone[name], adapters[name]) for name in adapters)
    assert set(whole_tensors) >= set(stored) | set(adapters)
    assert all(
        torch.equal(whole_tensors[name], tensor) for name, tensor in stored.items()
    )
    assert all(
        torch.equal(whole_tensors[name], tensor) for name, tensor in adapters.items()
    )


@pytest.mark.parametrize("job", list(JOBS))
def test_identity_is_that_of_matrices_and_adapters_whatever_was_sent(
    job, folder, found
):
    ranks = sent(job, folder)
    alike = sent(reference(job), folder)
    for rank in ranks:
        assert (
            rank["identity"] == rank["whole"]["identity"] != rank["alone"]["identity"]
        )
        assert rank["first_identity"] == alike[0]["first_identity"] != rank["identity"]


@pytest.mark.parametrize(
    "job", each_job(["one", "tp2-sp-qwen3", "pp2-tied", *EXPERTS], SLOW)
)
def test_folders_that_are_written_beside_training_are_those_of_an_export(
    job, folder, found
):
    exports = folder / f"lora-{job}-run" / "exports"
    name = f"step-{STEPS:06d}"
    for beside, export in ((name, "merged"), (f"{name}-adapters", "adapters")):
        own_files = files_of(exports / beside)
        assert own_files.pop("slipstream-version.json")
        expected = files_of(folder / f"lora-{job}-{export}")
        # The digests of the file that names the version are there alone.
        del own_files["slipstream-manifest.json"]
        del expected["slipstream-manifest.json"]
        assert own_files == expected


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_frozen_matrix_that_moved_stops_the_run(
    folder: Path, found: dict[str, dict]
) -> None:
    assert "is frozen, but changed during the run" in sent("one", folder)[0]["moved"]


@pytest.mark.parametrize(
    "job",
    each_job(
        ["one", "tp2-sp-qwen3", "pp2-tied", "one-qwen35", "tp2-sp-qwen35", *EXPERTS],
        SLOW,
    ),
)
def test_merged_matrices_are_those_of_the_files_and_products_of_the_adapter_folder(
    job: str, folder: Path, found: dict[str, dict]
) -> None:
    stored = load_file(folder / lora_ranks.ALL[job][1] / "model.safetensors")
    ours = found[job]
    assert all(torch.equal(ours["before"][name], stored[name]) for name in stored)
    tensors = load_file(folder / f"lora-{job}-adapters" / "adapter_model.safetensors")
    moved = 0
    for name, base in stored.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base
        if f"{prefix}.lora_A.weight" in tensors:
            b = tensors[f"{prefix}.lora_B.weight"]
            a = tensors[f"{prefix}.lora_A.weight"]
            assert (a.shape[0], b.shape[1]) == (RANK, RANK)
            expected = base + SCALE * b @ a
            moved += ".experts." in name and not torch.equal(expected, base)
        torch.testing.assert_close(
            ours["weights"][name], expected, rtol=1e-6, atol=1e-7
        )
    # gate, up and down of 4 experts in each layer; one that no token chose would stay.
    assert moved >= 0.8 * sum(".experts." in name for name in stored)
    latent = {
        name.split(".")[4] for name in stored if "_a_proj" in name or "_b_proj" in name
    }
    latent |= {
        name.split(".")[4]
        for name in stored
        if ".linear_attn." in name and "_proj" in name
    }
    settings = json.loads(
        (folder / f"lora-{job}-adapters" / "adapter_config.json").read_text()
    )
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == (
        "LORA",
        RANK,
        ALPHA,
    )
    assert latent <= set(settings["target_modules"])
    for name in set(settings["target_modules"]):
        # Every named matrix has adapters in every layer that has the matrix.
        weights = [
            name_of_tensor
            for name_of_tensor in stored
            if name_of_tensor.endswith(f".{name}.weight")
        ]
        lora = [
            name_of_tensor
            for name_of_tensor in tensors
            if name_of_tensor.endswith(f".{name}.lora_B.weight")
        ]
        assert len(weights) == len(lora) > 0
    model = AutoModelForCausalLM.from_pretrained(
        folder / f"lora-{job}-merged", dtype=torch.float32
    )
    with torch.no_grad():
        merged = [
            target_logprobs(model, ids, 1.0) for ids in probe(config_of(job, folder))
        ]
    torch.testing.assert_close(
        torch.cat(merged), ours["logprobs"][-1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "job", each_job(["experts-one", "experts-etp2", "experts-tp2-ep2"], SLOW)
)
def test_adapters_of_experts_that_are_switched_off_have_no_effect(job, found):
    ours = found[job]
    assert torch.equal(ours["switched_off"], ours["base"])
    assert not torch.allclose(ours["logprobs"][-1], ours["base"], atol=1e-4)


@pytest.mark.parametrize("job", each_job(JOBS | EXPERTS, SLOW))
def test_step_after_a_checkpoint_is_the_one_before_bit_by_bit(
    job: str, found: dict[str, dict]
):
    ours = found[job]
    assert any(
        not torch.equal(ours["loaded"][n], t) for n, t in ours["weights"].items()
    )
    for name, tensor in ours["weights"].items():
        assert torch.equal(ours["retrained"][name], tensor), name


@pytest.mark.parametrize("job", each_job(OTHERS_CHECKPOINT, SLOW))
def test_rows_of_a_delta_nets_adapter_find_their_places_in_another_layout(
    job: str, found: dict
):
    ours = found[job]["loaded_across"]
    theirs = found[OTHERS_CHECKPOINT[job]]["loaded"]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6)
