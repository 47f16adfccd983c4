"""A rollout server that dies in the middle of a broadcast, with real engines over gloo."""

from pathlib import Path

import pytest
from support.rigs.kill_scenario import (
    check,
    config_of,
    gaps_of_versions,
    kill_one_of_two,
)

from benchmarks.common.rig import Placement
from benchmarks.common.shapes import make_shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("nothing_survives"),
]


# Mean over a step's tokens; the test below shows what those of the version before have.
GAP_MEAN = 1e-4


async def test_a_server_killed_while_it_receives_stops_nobody_and_comes_back(
    tmp_path: Path,
):
    model = make_shape(tmp_path / "model", "small", dtype="float32", max_positions=256)
    config = config_of(tmp_path, model, "gloo")
    outcome = await kill_one_of_two(
        config, Placement((), ((), ()), "cpu"), ["hung", 0.01]
    )
    check(outcome, gap_mean=GAP_MEAN)


async def test_tokens_of_the_version_before_have_a_gap_that_the_kill_would_show(
    tmp_path: Path,
):
    model = make_shape(tmp_path / "model", "small", dtype="float32", max_positions=256)
    config = config_of(tmp_path, model, "gloo", algorithm={"max_staleness": 1})
    right, wrong = await gaps_of_versions(config, Placement((), ((),), "cpu"), 20)
    assert right <= GAP_MEAN
    assert wrong >= 10 * GAP_MEAN
