"""Reference model and critic in layouts of their own, beside the policy in the same ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import role_ranks
import torch
from rank_pool import RankPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def swapped(rank_pool: RankPool, folder: Path) -> list[dict]:
    rank_pool.run(Path(role_ranks.__file__), ["groups"], world_size=2, folder=folder)
    return [torch.load(folder / f"groups-{rank}.pt", weights_only=True) for rank in range(2)]


def test_every_global_that_megatron_assigns_is_swapped(swapped: list[dict]) -> None:
    assert swapped[0]["unknown_globals"] == []


def test_each_layout_has_its_own_groups_while_it_is_in_force(swapped: list[dict]) -> None:
    for rank, found in enumerate(swapped):
        assert found["sizes_outside"] == found["sizes_after"] == (2, 1)
        assert found["sizes_inside"] == (1, 2)
        assert found["is_last_stage"] == (rank == 1)
        assert (found["sum_inside"], found["sum_after"]) == (1.0, 2.0)


def test_nothing_of_another_layout_is_left(swapped: list[dict]) -> None:
    for found in swapped:
        assert found["changed"] == []
        assert found["filled"] == {}
        assert found["is_same_draw"]
        assert found["is_same_tracked"]


def test_a_layout_that_is_not_in_force_is_refused(swapped: list[dict]) -> None:
    for found in swapped:
        assert found["refused_outside"]
        assert found["refused_inside"]
        assert found["refused_nested"]


def test_sequence_parallelism_needs_no_groups_of_its_own(swapped: list[dict]) -> None:
    for found in swapped:
        assert found["tp_of_same_groups"] == 2
        assert found["groups_again"] == 0
