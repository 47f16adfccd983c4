import pytest
from slipstream.core.settings.config import ParallelSection
from slipstream.core.settings.rank_layout import RankLayout


def layout_of(world_size: int, sizes: dict[str, int]) -> RankLayout:
    return RankLayout.of(ParallelSection(**sizes), world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "sizes", "dp", "expert_dp"),
    [
        (8, {"tp": 2, "pp": 4}, 1, 1),
        # etp is tp unless it is given, and neither grid divides the other.
        (32, {"tp": 2, "ep": 8}, 16, 2),
        (32, {"tp": 2, "ep": 8, "etp": 1}, 16, 4),
        (32, {"tp": 2, "cp": 4, "ep": 8}, 4, 2),
        (32, {"tp": 2, "pp": 4, "ep": 8, "etp": 1}, 4, 1),
        (6, {"tp": 3, "ep": 2, "etp": 1}, 2, 3),
    ],
)
def test_data_parallel_sizes_are_what_the_other_sizes_leave(world_size, sizes, dp, expert_dp):
    layout = layout_of(world_size, sizes)
    assert (layout.dp, layout.expert_dp) == (dp, expert_dp)


def test_description_names_every_group_that_has_more_than_one_rank() -> None:
    assert layout_of(8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}).describe(has_experts=True) == (
        "8 ranks: tp 2, pp 2, cp 1, dp 2; experts: ep 2, etp 1, dp 2\n"
        "tp: 4 x 2: [0 1] [2 3] [4 5] [6 7]\n"
        "dp: 4 x 2: [0 2] [1 3] [4 6] [5 7]\n"
        "pp: 4 x 2: [0 4] [1 5] [2 6] [3 7]\n"
        "ep: 4 x 2: [0 1] [2 3] [4 5] [6 7]\n"
        "expert_dp: 4 x 2: [0 2] [1 3] [4 6] [5 7]"
    )
    assert layout_of(1, {}).describe(has_experts=False) == "1 rank: tp 1, pp 1, cp 1, dp 1"


def test_description_of_many_ranks_is_short() -> None:
    lines = layout_of(256, {"tp": 8, "pp": 16, "cp": 2}).describe(has_experts=False).splitlines()
    assert lines[1] == (
        "tp: 32 x 8: [0-7] [8-15] [16-23] [24-31] [32-39] [40-47] [48-55] ... [248-255]"
    )
    assert lines[3].startswith("pp: 16 x 16: [0 16 32 .. 240] [1 17 33 .. 241]")
    assert max(map(len, lines)) < 200
