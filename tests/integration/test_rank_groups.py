"""The groups that a dry run prints are those that Megatron makes."""

import json
from pathlib import Path

import pytest
from slipstream.core.settings.parallel_rules import RankLayout
from slipstream.core.settings.sections import ParallelSection
from support.ranks import rank_groups
from support.ranks.rank_groups import LAYOUTS
from support.ranks.rank_pool import RankPool


@pytest.fixture(scope="module")
def made(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    rank_pool.run(Path(rank_groups.__file__), list(LAYOUTS), world_size=1, folder=folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_megatrons_generator_of_ranks(layout: str, made: Path) -> None:
    world_size, sizes = LAYOUTS[layout]
    found = RankLayout.of(ParallelSection(**sizes), world_size).groups()
    expected = json.loads((made / f"{layout}.json").read_text())
    assert json.loads(json.dumps(found)) == expected
