"""A real engine that takes changes from storage: on a CPU, whose matrices are kept plain."""

import pytest
from support.rigs.receiver_story import run_rig

pytestmark = pytest.mark.long

# What the story loads, and whether as changes; the failures and what mends them come last.
WHOLE, CHANGES, FAILURE = (False, True), (True, True), (True, False)
LOADS = [WHOLE, WHOLE, CHANGES, WHOLE, CHANGES, CHANGES, FAILURE, WHOLE, FAILURE, WHOLE]


@pytest.mark.parametrize(
    "options",
    [
        ("--shape", "tied", "--plain"),
        pytest.param(("--plain", "--tensor-parallel-size", "2"), marks=pytest.mark.slow),
        pytest.param(
            ("--quantization", "fp8_per_channel", "--delta", "host"), marks=pytest.mark.slow
        ),
    ],
)
def test_changes_from_storage_make_the_bits_of_the_whole_version(tmp_path, options):
    report = run_rig(tmp_path / "model", *options, limit_s=500, program="stored_rig.py")
    loads = report["load"]
    assert [(load["changes"], load["digests_agree"]) for load in loads] == LOADS
    assert [load["by_plan"] for load in loads[:3]] == [False, True, True]
    assert loads[2]["mbytes"] < loads[1]["mbytes"] / 8
    (changes,) = report["changes"]
    assert changes["equal"]
    assert changes["bits_equal"]
    assert changes["differ"] > 1e-4
    (in_flight,) = report["in_flight"]
    assert in_flight["tokens"] == [300]
    assert in_flight["most_versions"] == 2
    for scene in ("several", "in_flight", "damaged", "cut"):
        assert report[scene][0]["bits_equal"]
    # The damage was proved and not loaded over; the file that was cut was not taken for whole.
    damaged, cut = loads[6], loads[8]
    assert damaged["error"] == ""
    assert "the fetched weights end at byte" in cut["error"]
