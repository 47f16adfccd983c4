"""The groups that a dry run prints are those that Megatron makes."""

import pytest
from megatron.core.parallel_state import RankGenerator
from slipstream.core.settings.parallel_rules import RankLayout
from slipstream.core.settings.sections import ParallelSection

# world size, sizes
LAYOUTS = {
    "one": (1, {}),
    "tp2-pp4": (8, {"tp": 2, "pp": 4}),
    "tp2-cp2-pp2": (16, {"tp": 2, "pp": 2, "cp": 2}),
    "tp4-ep4-etp1": (16, {"tp": 4, "ep": 4, "etp": 1}),
    "tp2-cp2-pp2-ep4-etp1": (16, {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1}),
    "tp2-ep8": (32, {"tp": 2, "ep": 8}),
    "tp2-cp4-ep8": (32, {"tp": 2, "cp": 4, "ep": 8}),
    "tp8-pp16-cp2": (256, {"tp": 8, "pp": 16, "cp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_megatrons_generator_of_ranks(layout: str) -> None:
    world_size, sizes = LAYOUTS[layout]
    tp, cp, pp, ep = (sizes.get(name, 1) for name in ("tp", "cp", "pp", "ep"))
    etp = sizes.get("etp", tp)
    # Megatron's `initialize_model_parallel` makes its two generators the same way.
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(
        tp=tp, ep=1, dp=world_size // (tp * cp * pp), pp=pp, cp=cp, order=order
    )
    replicas = world_size // (etp * ep * pp)
    expert = RankGenerator(tp=etp, ep=ep, dp=replicas, pp=pp, cp=1, order=order)
    expected = {name: dense.get_ranks(name) for name in ("tp", "cp", "dp", "pp")} | {
        "etp": expert.get_ranks("tp"),
        "ep": expert.get_ranks("ep"),
        "expert_dp": expert.get_ranks("dp"),
    }
    layout_groups = RankLayout.of(ParallelSection(**sizes), world_size).groups()
    assert {
        name: [list(group) for group in groups]
        for name, groups in layout_groups.items()
    } == expected
