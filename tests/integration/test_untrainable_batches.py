"""The real trainer is given batches that it cannot train, on one rank and on two."""

from pathlib import Path

import pytest
from support.fakes.tiny_models import make_model_folder
from support.ranks import poisoned_ranks
from support.ranks.poisoned_ranks import FAULTY, JOBS, POISONS, good_batch
from support.ranks.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("one_thread")

GROUP = good_batch(1).trajectories[FAULTY].group_id
ID = good_batch(1).trajectories[FAULTY].trajectory_id
CAUSES = {
    "rewards": f"advantages are not finite, of rewards from -1e+39 to -1e+39 ({ID})",
    "loss": f"the loss is inf; the weights were not changed ({ID})",
    "token": f"token 32 is outside the vocabulary of 32 ({ID})",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poisoned")
    make_model_folder(folder / "model")
    return folder


def told_by(pool: RankPool, folder: Path, world_size: int) -> dict[str, list[dict]]:
    """What the ranks of each job told, by rank."""
    sizes = {name: world_size for name, job in JOBS.items() if job.world_size == world_size}
    return pool.found(poisoned_ranks, sizes, folder, "{}-{}.pt")


@pytest.fixture(scope="module")
def one_rank(rank_pool: RankPool, folder: Path) -> dict[str, list[dict]]:
    return told_by(rank_pool, folder, 1)


@pytest.fixture(scope="module")
def two_ranks(rank_pool: RankPool, folder: Path) -> dict[str, list[dict]]:
    return told_by(rank_pool, folder, 2)


def check_poisoned(poisoned: dict, plain: dict) -> None:
    """Each bad batch is reported with its group; the steps have the bits of a run without them."""
    assert poisoned["error"] == plain["error"] == ""
    assert poisoned["steps"] == plain["steps"] == ["batch-0", "batch-1"]
    assert poisoned["digests"] == plain["digests"]
    assert plain["failures"] == []
    assert [batch for _, _, batch, _ in poisoned["failures"]] == [f"bad-{n}" for n in POISONS]
    assert all((step, groups) == (1, [GROUP]) for _, step, _, groups in poisoned["failures"])
    causes = dict(zip(POISONS, (message for message, *_ in poisoned["failures"]), strict=True))
    assert causes.pop("length").startswith("a sequence of ")
    assert causes.pop("pixels").startswith(f"{ID}: an image cannot be read: ")
    assert causes == CAUSES


def test_a_rank_goes_on_with_the_same_weights_after_each_kind_of_bad_batch(one_rank):
    check_poisoned(one_rank["poisoned"][0], one_rank["plain"][0])


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp", "tp", "pp", "cp", "trees"])
def test_two_ranks_agree_and_go_on(layout: str, two_ranks: dict[str, list[dict]]) -> None:
    main, other = two_ranks[f"{layout}-poisoned"]
    check_poisoned(main, two_ranks[f"{layout}-plain"][0])
    assert (other["error"], other["failures"]) == ("", [])


def test_the_faulty_episode_is_a_tree() -> None:
    assert len(good_batch(1, trees=True).trajectories[FAULTY].branches) > 1


def test_a_batch_without_a_sampled_token_is_reported(one_rank: dict[str, list[dict]]) -> None:
    told = one_rank["empty"][0]
    assert told["error"] == ""
    (failure,) = told["failures"]
    assert failure[0].startswith("no trajectory has a sampled token")
    assert len(failure[3]) == len(set(good_batch(1).group_ids))
    assert told["digests"] == one_rank["plain"][0]["digests"]


def test_parameters_without_a_finite_gradient_are_named(one_rank: dict[str, list[dict]]) -> None:
    told, plain = one_rank["gradient"][0], one_rank["plain"][0]
    (failure,) = told["failures"]
    assert failure[0].startswith("the gradient norm is nan, not finite in 1 of ")
    assert " parameters, first in decoder.final_layernorm.weight; the weights were" in failure[0]
    # Nothing of it is left.
    assert told["digests"] == plain["digests"]


def test_a_step_that_changed_weights_before_it_failed_starts_again(one_rank: dict[str, list[dict]]):
    told = one_rank["second-mini-batch"][0]
    (failure,) = told["failures"]
    assert failure[3] == [GROUP]
    assert told["error"].startswith("StartAgain: step 2 changed weights before it failed")
    assert told["steps"] == ["batch-0"]


def test_weights_that_are_no_numbers_are_not_the_batchs_fault(one_rank: dict[str, list[dict]]):
    told = one_rank["broken-weights"][0]
    assert told["failures"] == []
    assert told["error"].startswith("RunFailed: ")
    assert "weights" in told["error"]


def test_without_another_batch_the_trainer_fails_with_the_cause(one_rank: dict[str, list[dict]]):
    told = one_rank["for-good"][0]
    assert told["error"] == f"UntrainableBatch: {CAUSES['loss']}"
    assert told["steps"] == ["batch-0"]
