"""Every parallel layout trains like one rank, and one rank like plain transformers and torch."""

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from slipstream.core.models.model_files import is_untrained
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.learner.trainer.batches.training_sequence import token_lags, zigzag
from support.fakes.parity_models import NUM_LAYERS
from support.fakes.published_kimi import published_name
from support.ranks import parity_ranks
from support.ranks.parity_layouts import (
    EXTRAORDINARY,
    LAYOUTS,
    LONG,
    PARITY_STEPS,
    SLOW,
    batches,
    batches_of,
    config_of,
    each_layout_of,
)
from support.ranks.rank_pool import RankPool, chosen_jobs, each_job
from support.references.plain_policy import PlainPolicy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> set[str]:
    """The layouts that the tests to be run are about."""
    return set(chosen_jobs(request, LAYOUTS, parameter="layout"))


@pytest.fixture(scope="module")
def one_rank(rank_pool: RankPool, folder: Path, chosen: set[str]) -> dict[str, dict]:
    always = {"one", "one-mini-batches", "one-gspo", "one-cispo", *EXTRAORDINARY}
    references = {LAYOUTS[name].reference for name in chosen}
    return run_layouts(rank_pool, folder, 1, always | references | chosen)


@pytest.fixture(scope="module")
def several_ranks(
    rank_pool: RankPool, folder: Path, chosen: set[str]
) -> Callable[[str], dict[str, dict]]:
    """Returns what the layouts of as many ranks as one has saw, which are run when one is asked."""

    @functools.cache
    def of_size(world_size: int) -> dict[str, dict]:
        return run_layouts(rank_pool, folder, world_size, chosen)

    return lambda layout: of_size(LAYOUTS[layout].world_size)


def run_layouts(
    pool: RankPool, folder: Path, world_size: int, chosen: set[str]
) -> dict[str, dict]:
    """Results by name: layouts of `chosen` with `world_size` ranks, in turn in the same ranks."""
    all_layouts = LAYOUTS | EXTRAORDINARY
    names = [
        name
        for name in all_layouts
        if name in chosen and all_layouts[name].world_size == world_size
    ]
    return pool.found(parity_ranks, dict.fromkeys(names, world_size), folder)


@pytest.mark.parametrize("layout", each_layout_of(1))
def test_one_rank_trains_like_plain_transformers(layout, folder, one_rank):
    path = folder / LAYOUTS[layout].model
    config = config_of(layout, folder)
    plain = PlainPolicy(path, config)
    if config.reference is not None and config.reference.server is None:
        plain.references[""] = (
            plain if config.reference.policy else PlainPolicy(path, config)
        )
        for name, teacher in config.reference.teachers.items():
            if teacher.policy:
                plain.references[name] = plain
            elif teacher.path is not None:
                plain.references[name] = PlainPolicy(teacher.path, config)
    result = one_rank[layout]
    torch.testing.assert_close(
        result["logprobs"][0], plain.probe(), rtol=1e-5, atol=1e-5
    )
    for step, batch in enumerate(batches_of(layout, plain.config)[:PARITY_STEPS]):
        expected = plain.step(batch)
        for name, value in expected.items():
            assert result["metrics"][step][name] == pytest.approx(
                value, rel=1e-5, abs=2e-6
            ), (
                step,
                name,
            )
    torch.testing.assert_close(
        result["logprobs"][-1], plain.probe(), rtol=1e-5, atol=2e-5
    )
    trained = plain.model.state_dict()
    weights = result["weights"]
    model = LAYOUTS[layout].model
    # The files of gpt-oss, too, have one tensor for all experts of a layer.
    if model != "gpt-oss":
        trained = one_by_one(trained, is_minimax=model == "minimax")
    if model == "kimi25":
        trained = {published_name(name): tensor for name, tensor in trained.items()}
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-6, atol=1e-6)


def test_grpo_written_down_again_gives_the_same_bits(one_rank: dict[str, dict]) -> None:
    own_result = one_rank["own"]
    built_in = one_rank["one-mini-batches"]
    for step, metrics in enumerate(built_in["metrics"]):
        found = own_result["metrics"][step]
        assert {
            name: found[name]
            for name in ("loss", "grad_norm", "importance_weight_mean")
        } == {
            name: metrics[name]
            for name in ("loss", "grad_norm", "importance_weight_mean")
        }
        assert 0 <= found["own_reward"] <= 1
        assert found["own_clip_fraction"] == metrics["clip_fraction"]
        assert found["own_ratio_max"] == metrics["importance_ratio_max"]
    assert own_result["weights"].keys() == built_in["weights"].keys()
    for name, tensor in built_in["weights"].items():
        assert torch.equal(own_result["weights"][name], tensor), name


def one_by_one(
    weights: dict[str, torch.Tensor], *, is_minimax: bool
) -> dict[str, torch.Tensor]:
    """transformers keeps the experts of a layer in one tensor; in files each has its own."""
    names = ("w1", "w3", "w2") if is_minimax else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in weights.items():
        if is_minimax:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, own_logprobs in zip(names, both.chunk(2), strict=False):
                    found[name.replace("gate_up_proj", f"{expert}.{part}.weight")] = (
                        own_logprobs
                    )
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                found[name.replace("down_proj", f"{expert}.{names[2]}.weight")] = down
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("layout", each_layout_of(2, 4, 8, 16))
def test_ranks_train_like_one(layout, one_rank, several_ranks):
    result = several_ranks(layout)[layout]
    expected = one_rank[LAYOUTS[layout].reference]
    for name, tensor in expected["before"].items():
        assert torch.equal(result["before"][name], tensor), name
    assert result["digest"] == expected["digest"]
    for step in range(PARITY_STEPS):
        ours = result["metrics"][step]
        theirs = expected["metrics"][step]
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
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), (
                step,
                name,
            )
        of_teachers = {name for name in theirs if name.startswith("teacher/")}
        assert {name for name in ours if name.startswith("teacher/")} == of_teachers
        for name in of_teachers:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), name
        for name in ("routing_difference", "routing_unrecorded"):
            assert ours.get(name) == theirs.get(name), (step, name)
    for ours, theirs in zip(result["logprobs"], expected["logprobs"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(
            result["weights"][name], tensor, rtol=1e-5, atol=2e-6
        )


@pytest.mark.parametrize("layout", each_layout_of(4, 8))
def test_each_rank_gets_its_part_of_its_replicas_share(layout, folder, several_ranks):
    """Every sequence is trained by one replica, all of whose ranks get the same micro batches.

    Context parallel ranks get the same when they are put together again.
    """
    several_ranks(layout)
    world_size = LAYOUTS[layout].world_size
    ranks = [
        torch.load(folder / f"{layout}-rank-{rank}.pt", weights_only=True)
        for rank in range(world_size)
    ]
    config = config_of(layout, folder)
    cp = config.learner.parallel.cp
    dp = world_size // (config.learner.parallel.tp * config.learner.parallel.pp * cp)
    assert len({len(rank["micro_batches"]) for rank in ranks}) == 1
    trained = []
    for replica in range(dp):
        members = [rank for rank in ranks if rank["dp"] == replica]
        assert len(members) == world_size // dp
        shares = {member["cp"]: member["micro_batches"] for member in members}
        assert len(shares) == cp
        for member in members:
            for (tokens, bounds), (same, same_bounds) in zip(
                member["micro_batches"], shares[member["cp"]], strict=True
            ):
                assert torch.equal(tokens, same)
                assert bounds == same_bounds
        for micro_batch in zip(*shares.values(), strict=True):
            trained += whole_sequences(list(shares), micro_batch)
    sequences = [
        t.token_ids[part.tokens].tolist()
        for t in batches(config)[0].trajectories
        for part in t.sequences
    ]
    padded = [
        tokens + [0] * (-len(tokens) % (2 * cp if cp > 1 else 1))
        for tokens in sequences
    ]
    # Before the first of several mini-batches the policy scores the whole batch.
    passes = 1 if config.algorithm.mini_batches == 1 else 2
    assert sorted(tokens for tokens in trained if any(tokens)) == sorted(
        padded * passes
    )


def whole_sequences(cp_ranks: list[int], shares: tuple) -> list[list[int]]:
    """The sequences of one micro batch, put together from its context parallel shares."""
    bounds = shares[0][1]
    all_tokens = torch.full((bounds[-1],), -1)
    for cp_rank, (tokens, same_bounds) in zip(cp_ranks, shares, strict=True):
        assert same_bounds == bounds
        all_tokens[zigzag(bounds, cp_rank, len(cp_ranks))] = tokens
    return [all_tokens[start:end].tolist() for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("layout", ["dp4-few"])
def test_replica_without_a_sequence_has_a_micro_batch_of_filler(
    layout, folder, several_ranks
):
    assert several_ranks(layout)[layout]["metrics"][0]["num_micro_batches"] == 4
    ranks = [
        torch.load(folder / f"{layout}-rank-{rank}.pt", weights_only=True)
        for rank in range(4)
    ]
    sizes = sorted(len(tokens) for rank in ranks for tokens, _ in rank["micro_batches"])
    assert sizes[0] == 1
    assert sizes[1] > 1


# A job for each model.
MODELS = [
    "one",
    *(name for name, layout in LAYOUTS.items() if name == f"one-{layout.model}"),
]


@pytest.mark.parametrize("layout", each_job(MODELS, SLOW.split(), LONG.split()))
def test_exported_folder_has_the_models_logits(layout, folder, one_rank):
    plain = PlainPolicy(folder / f"{layout}-final", config_of(layout, folder))
    torch.testing.assert_close(
        plain.probe(), one_rank[layout]["logprobs"][-1], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("layout", each_job(MODELS, SLOW.split(), LONG.split()))
def test_a_load_brings_every_tensor_of_the_folder_unchanged(layout, folder, one_rank):
    source = folder / LAYOUTS[layout].model
    stored = load_file(source / "model.safetensors")
    sizes = read_model_sizes(source)
    idle = {name for name in stored if is_untrained(name, sizes)}
    assert {name.split(".")[0] for name in idle} == (
        {"mm_projector", "vision_tower"} if sizes.family.decoder_folder else set()
    )
    result = one_rank[layout]["before"]
    assert stored.keys() - idle == set(result)
    assert all(torch.equal(result[name], stored[name]) for name in result)
    exported = load_file(folder / f"{layout}-final" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in idle)


def test_biases_that_choose_experts_are_not_rounded(
    rank_pool: RankPool, folder: Path
) -> None:
    job = "one-glm@bfloat16"
    result = rank_pool.found(parity_ranks, {job: 1}, folder)[job]
    stored = load_file(folder / "glm" / "model.safetensors")
    exported = load_file(folder / f"{job}-final" / "model.safetensors")
    names = [name for name in stored if name.endswith(".e_score_correction_bias")]
    assert len(names) == NUM_LAYERS - 1
    for name in names:
        assert not torch.equal(stored[name], stored[name].bfloat16().float())
        for tensors in (result["before"], result["weights"], exported):
            assert torch.equal(tensors[name], stored[name])


def test_statistics_are_those_of_the_batch(
    folder: Path, one_rank: dict[str, dict]
) -> None:
    for step, batch in enumerate(batches(config_of("one", folder))[:PARITY_STEPS]):
        metrics = one_rank["one"]["metrics"][step]
        assert metrics["trained_tokens"] == sum(
            t.num_sampled_tokens for t in batch.trajectories
        )
        fresh = sum(int((token_lags([t], step) == 0).sum()) for t in batch.trajectories)
        assert metrics["logprob_gap_tokens"] == fresh
        assert metrics["clip_fraction"] == 0.0
        assert metrics["learning_rate"] == pytest.approx([5e-4, 1e-3][step])


def test_algorithms_that_are_compared_clip_cut_and_mask_a_part(
    one_rank: dict[str, dict],
) -> None:
    """Layouts of an algorithm that clips and masks nothing would agree about nothing."""
    expected = {
        "one-gspo": (
            "clip_fraction",
            "importance_capped_fraction",
            "effective_sample_size",
        ),
        "one-cispo": (
            "masked_token_fraction",
            "masked_sequence_fraction",
            "effective_sample_size",
        ),
    }
    for layout, names in expected.items():
        for name in names:
            values = [metrics[name] for metrics in one_rank[layout]["metrics"]]
            assert all(0 <= value < 1 for value in values)
            assert max(values) > 0.01, (layout, name)


def test_trees_that_are_compared_have_several_branches_of_different_shares(
    folder: Path,
) -> None:
    for batch in batches(config_of("one-trees", folder)):
        trees = [t for t in batch.trajectories if len(t.branches) > 1]
        assert len(batch.trajectories) > len(trees) > 4
        assert {b.share for t in trees for b in t.branches} >= {1.0, 0.5}


def test_gradients_are_finalized_once_for_each_mini_batch(
    one_rank: dict[str, dict],
) -> None:
    assert one_rank["one"]["finalizations"] == PARITY_STEPS
    assert one_rank["one-mini-batches"]["finalizations"] == 2 * PARITY_STEPS
    assert one_rank["one"]["metrics"][0]["num_micro_batches"] > 1


def test_step_that_is_not_finite_stops_before_the_weights_change(
    one_rank: dict[str, dict],
) -> None:
    error = one_rank["overflow"]["error"]
    cause = r"the .* is (nan|inf)(, not finite in .*)?; the weights were not changed"
    assert re.fullmatch(cause, error)
    assert one_rank["overflow"]["is_same"]


def test_step_whose_episodes_are_all_filtered_trains_nothing(
    one_rank: dict[str, dict],
) -> None:
    result = one_rank["nothing-trained"]
    for name in ("trained_tokens", "loss", "grad_norm", "entropy"):
        assert result["metrics"][name] == 0.0
    assert result["is_finite"]


def test_replay_keeps_the_gap_where_routers_differ(one_rank: dict[str, dict]) -> None:
    result = one_rank["disturbed-routers"]
    # The same routers choose the same experts, and replaying them changes nothing.
    assert result["gap_own"] <= 1e-5
    assert result["gap_replayed"] <= 1e-5
    # Other experts are chosen: 1 of 100 choices is enough to be seen in every log-probability.
    assert 0.01 < result["routing_difference"] < 0.3
    assert result["gap_replayed_disturbed"] < 0.5 * result["gap_own_disturbed"]
