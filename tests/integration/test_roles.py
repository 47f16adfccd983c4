"""Reference model and critic in layouts of their own, beside the policy in the same ranks."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.core.types import Trajectory
from slipstream.extensions.other_models.trainer import explained_variance
from slipstream.learner.trainer.batches.batch import Batch
from support.ranks import role_ranks
from support.ranks.parity_layouts import OTHER, batches
from support.ranks.rank_pool import RankPool, chosen_jobs, jobs_of_file
from support.ranks.rank_program import SETTINGS
from support.ranks.role_ranks import (
    CRITIC_RATE,
    LAYOUTS,
    OTHER_TEMPERATURE,
    STEP_METRICS,
    TOP_K,
    VALUE_CLIP,
    config_of,
)
from support.references.plain_algorithm import conversations
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.long_but("one"), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def one_rank(
    rank_pool: RankPool, folder: Path, request: pytest.FixtureRequest
) -> dict[str, list[dict]]:
    return run_layouts(rank_pool, folder, jobs_of_file(request, layouts_of(1)))


@pytest.fixture(scope="module")
def two_ranks(
    rank_pool: RankPool, folder: Path, request: pytest.FixtureRequest
) -> dict[str, list[dict]]:
    return run_layouts(
        rank_pool, folder, chosen_jobs(request, layouts_of(2), parameter="layout")
    )


def layouts_of(world_size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.world_size == world_size]


def run_layouts(
    pool: RankPool, folder: Path, names: list[str]
) -> dict[str, list[dict]]:
    """What each rank of each layout saw."""
    sizes = {name: LAYOUTS[name].world_size for name in names}
    return pool.found(role_ranks, sizes, folder, "{}-{}.pt")


class PlainCritic:
    """The same critic on transformers and torch: one conversation at a time, unpacked."""

    def __init__(self, path: Path) -> None:
        self.body = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        ).model
        weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
        self.head = torch.nn.Linear(64, 1)
        self.head.weight.data = weight * 0.1 / math.sqrt(64)
        self.head.bias.data.zero_()
        self.parameters = [*self.body.parameters(), *self.head.parameters()]
        # The learner's weight decay, of matrices alone.
        decay = SETTINGS["learner"]["weight_decay"]
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [
                        parameter for parameter in self.parameters if parameter.ndim > 1
                    ],
                    "weight_decay": decay,
                },
                {
                    "params": [
                        parameter
                        for parameter in self.parameters
                        if parameter.ndim == 1
                    ],
                    "weight_decay": 0.0,
                },
            ],
            lr=CRITIC_RATE,
            betas=(0.9, 0.95),
            eps=1e-3,
        )

    def values(self, trajectory: Trajectory) -> torch.Tensor:
        """What stands before each sampled token, in one conversation after the other."""
        return torch.cat(
            [
                self._values(conversation)
                for conversation, _ in conversations(trajectory)
            ]
        )

    def _values(self, trajectory: Trajectory) -> torch.Tensor:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        states = self.body(ids).last_hidden_state[0]
        before = torch.from_numpy(trajectory.sampled_mask())[1:].nonzero()[:, 0]
        return self.head(states[before])[:, 0]

    @torch.no_grad()
    def all_values(self, batch: Batch) -> list[np.ndarray]:
        return [self.values(trajectory).numpy() for trajectory in batch.trajectories]

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer step for each of two mini-batches."""
        old = self.all_values(batch)
        returns = [
            np.asarray(t.reward + 0.1 * np.arange(len(v)), dtype=np.float32)
            for t, v in zip(batch.trajectories, old, strict=True)
        ]
        losses = 0.0
        norms = []
        num_tokens = 0
        num_clipped = 0
        for members in batch.mini_batches(2):
            total = torch.zeros(())
            tokens = 0
            for index in dict.fromkeys(batch.owners[place] for place in members):
                values = self.values(batch.trajectories[index])
                before = torch.from_numpy(old[index])
                expected = torch.from_numpy(returns[index])
                near = values.clamp(before - VALUE_CLIP, before + VALUE_CLIP)
                errors = (values - expected) ** 2
                bounded = (near - expected) ** 2
                total = total + 0.5 * torch.maximum(errors, bounded).sum()
                num_clipped += int((bounded > errors).sum())
                tokens += len(values)
            self.optimizer.zero_grad()
            (total / tokens).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.parameters, 1.0).item())
            self.optimizer.step()
            losses += total.item()
            num_tokens += tokens
        return {
            "value_loss": losses / num_tokens,
            "critic_grad_norm": sum(norms) / 2,
            "value_clip_fraction": num_clipped / num_tokens,
            "explained_variance": explained_variance(
                np.concatenate(old), np.concatenate(returns)
            ),
        }


@pytest.mark.parametrize("layout", layouts_of(1))
def test_the_critic_learns_like_plain_transformers(layout, folder, one_rank):
    plain = PlainCritic(folder / LAYOUTS[layout].model)
    result = one_rank[layout][0]
    clipped = 0.0
    for step, batch in enumerate(batches(config_of(layout, folder))):
        values = torch.from_numpy(np.concatenate(plain.all_values(batch)))
        torch.testing.assert_close(result["values"][step], values, rtol=1e-5, atol=1e-5)
        for name, value in plain.train(batch).items():
            assert result["critic"][step][name] == pytest.approx(
                value, rel=1e-5, abs=1e-6
            ), name
        clipped += result["critic"][step]["value_clip_fraction"]
    assert clipped > 0


@pytest.mark.parametrize("layout", ["one", "one-trees", "one-by-environment"])
def test_the_reference_says_what_the_start_folder_says(layout, folder, one_rank):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    expected = []
    likely = []
    trajectories = batches(config_of(layout, folder))[0].trajectories
    for trajectory, _ in itertools.chain.from_iterable(
        map(conversations, trajectories)
    ):
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            temperature = OTHER_TEMPERATURE if trajectory.environment == OTHER else 0.8
            logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        mask = torch.from_numpy(trajectory.sampled_mask())[1:]
        expected.append(logprobs.gather(1, ids[0, 1:, None])[:, 0][mask])
        best = logprobs[mask].topk(TOP_K)
        likely.append(
            torch.zeros(logprobs[mask].shape).scatter(1, best.indices, best.values)
        )
    result = one_rank[layout][0]
    torch.testing.assert_close(
        result["likely"], torch.cat(likely), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        result["reference"], torch.cat(expected), rtol=1e-5, atol=1e-5
    )
    assert result["gradients_of_reference"] == 0


@pytest.mark.parametrize("layout", layouts_of(2))
def test_roles_on_two_ranks_do_what_they_do_on_one(layout, one_rank, two_ranks):
    of_layout = LAYOUTS[layout]
    ranks = two_ranks[layout]
    reference = "one-trees" if of_layout.sampling else "one"
    expected = one_rank["one-tied" if of_layout.model == "tied" else reference][0]
    for rank_result in ranks:
        for name in ("reference", "likely"):
            torch.testing.assert_close(
                rank_result[name], expected[name], rtol=1e-5, atol=2e-5
            )
        for name in ("values", "references"):
            for ours, theirs in zip(rank_result[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
        for ours, theirs in zip(rank_result["critic"], expected["critic"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=2e-6)
        for ours, theirs in zip(
            rank_result["metrics"], expected["metrics"], strict=True
        ):
            for name in STEP_METRICS:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=2e-6), (
                    name
                )
        check_refresh(rank_result)
    heads = [rank["head"] for rank in ranks if rank["head"]]
    assert heads
    assert all(torch.equal(head["weight"], heads[0]["weight"]) for head in heads)


def check_refresh(found: dict) -> None:
    """The reference stays where it is until it takes what the policy has become."""
    first, second, third = found["references"]
    assert torch.equal(first, found["reference"])
    assert not torch.allclose(second, first, atol=1e-3)
    assert torch.equal(third, second)
    torch.testing.assert_close(
        found["refreshed"], found["policy"], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("layout", layouts_of(1))
def test_a_refreshed_reference_is_the_policy(
    layout: str, one_rank: dict[str, list[dict]]
) -> None:
    result = one_rank[layout][0]
    check_refresh(result)
    divergence = [metrics["kl_reference"] for metrics in result["metrics"]]
    assert divergence[0] == pytest.approx(0.0, abs=1e-9)
    assert divergence[2] == pytest.approx(0.0, abs=1e-9)
    # With the tied model the policy moves from the first step on.
    assert (divergence[1] > 1e-4) == (layout == "one-tied")


def test_every_weight_of_a_refreshed_reference_is_the_policys(
    rank_pool, folder
) -> None:
    job = "refresh:gpt-oss:gpt-oss"
    result = rank_pool.found(role_ranks, {job: 1}, folder)[job]
    assert result["stale"] == []
    assert any(".experts.linear_fc1.weight0" in name for name in result["names"])


def test_the_policy_waits_until_the_critic_is_warm(
    one_rank: dict[str, list[dict]],
) -> None:
    result = one_rank["one"][0]
    assert result["is_policy_same"] == [True, False, False]
    assert [metrics["learning_rate"] for metrics in result["metrics"]] == [
        0.0,
        5e-4,
        1e-3,
    ]
    assert all(metrics["critic_grad_norm"] > 0 for metrics in result["metrics"])
    # Adam's average holds a tenth of the first gradient that moved the policy, which was clipped,
    # and nothing of those by values that the critic had not learnt.
    gradient = min(result["metrics"][1]["grad_norm"], 1.0)
    assert result["momentum"][1] == pytest.approx(0.1 * gradient, rel=1e-4)


@pytest.fixture(scope="module")
def swapped(rank_pool: RankPool, folder: Path) -> list[dict]:
    return rank_pool.found(role_ranks, {"groups": 2}, folder, "{}-{}.pt")["groups"]


def test_each_layout_has_its_own_groups_while_it_is_in_force(
    swapped: list[dict],
) -> None:
    for rank, rank_result in enumerate(swapped):
        assert rank_result["sizes_outside"] == rank_result["sizes_after"] == (2, 1)
        assert rank_result["sizes_inside"] == (1, 2)
        assert rank_result["counts"] == (rank == 1)
        assert (rank_result["sum_inside"], rank_result["sum_after"]) == (1.0, 2.0)
        assert rank_result["refused"] == [True, True, True]
        # A single thread listens for all groups; a layout that is there needs none of its own.
        assert rank_result["gloo_threads"] == 1
        assert (rank_result["tp_of_same_groups"], rank_result["groups_again"]) == (2, 0)


def test_nothing_of_another_layout_is_left(swapped: list[dict]) -> None:
    for result in swapped:
        assert result["unknown_globals"] == result["changed"] == []
        assert result["filled"] == {}


SAVED = (
    "one",
    "tp2-pp2-dp2",
    "sp2-pp2-pp2-tied",
    "sp2-sp2-dp2-offload",
    "dp2-dp2-dp2-overlap",
)
# The checkpoint, and the layout into which it is loaded.
LOADED = (
    "one:one",
    "one:vpp2-dp2-pp2",
    "tp2-pp2-dp2:tp2-pp2-dp2",
    "tp2-pp2-dp2:dp2-sp2-sp2",
    "sp2-pp2-pp2-tied:one-tied",
    "sp2-sp2-dp2-offload:sp2-sp2-dp2-offload",
    "dp2-dp2-dp2-overlap:dp2-dp2-dp2-overlap",
)


@pytest.fixture(scope="module")
def checkpoints(
    rank_pool: RankPool, folder: Path, request: pytest.FixtureRequest
) -> dict[str, dict]:
    """What rank 0 saw in the last step of each run, saved and loaded ones."""
    jobs = {f"save:{name}": LAYOUTS[name].world_size for name in SAVED}
    loads = chosen_jobs(request, LOADED, parameter="load")
    second = {f"load:{load}": LAYOUTS[load.split(":")[1]].world_size for load in loads}
    second["start:one:tp2-pp2-dp2"] = 2
    saved = rank_pool.found(role_ranks, jobs, folder, "{}-0.pt")
    return saved | rank_pool.found(role_ranks, second, folder, "{}-0.pt")


@pytest.mark.parametrize("load", LOADED)
def test_all_models_go_on_from_a_checkpoint_in_any_layout(
    load: str, checkpoints: dict[str, dict]
):
    saved, layout = load.split(":")
    expected = checkpoints[f"save:{saved}"]
    result = checkpoints[f"load:{load}"]
    assert result["models"] == ("policy", "reference", "critic")
    if saved == layout:
        assert result["metrics"] == expected["metrics"]
        assert torch.equal(result["values"], expected["values"])
    else:
        assert result["metrics"] == pytest.approx(
            expected["metrics"], rel=1e-5, abs=2e-6
        )
        torch.testing.assert_close(
            result["values"], expected["values"], rtol=1e-5, atol=1e-5
        )


def test_roles_without_a_folder_start_from_the_weights_that_the_policy_starts_from(
    checkpoints: dict[str, dict], one_rank: dict[str, list[dict]]
) -> None:
    result = checkpoints["start:one:tp2-pp2-dp2"]
    of_folder = one_rank["one"][0]
    assert result["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert not torch.allclose(result["reference"], of_folder["reference"], atol=1e-3)
    assert not torch.allclose(result["values"], of_folder["values"][0], atol=1e-3)
