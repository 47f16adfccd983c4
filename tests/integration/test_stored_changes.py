"""A real engine that loads what was fetched from storage, on a CPU with plain matrices."""

import pytest
from support.rigs.receiver_story import run_rig

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "options",
    [
        ("--shape", "tied", "--plain"),
        pytest.param(("--plain", "--tensor-parallel-size", "2"), marks=pytest.mark.slow),
        pytest.param(("--quantization", "fp8_per_channel"), marks=pytest.mark.slow),
    ],
)
def test_changes_from_storage_make_the_bits_of_the_whole_version(tmp_path, options):
    report = run_rig(tmp_path / "model", *options, limit_s=500, program="stored_rig.py")
    loads = report["load"]
    # The file that was cut comes last but one, and what mends that.
    assert [load["digests_agree"] for load in loads] == [*(len(loads) - 2) * [True], False, True]
    is_copied = "--quantization" not in options
    assert [load["by_plan"] for load in loads[:3]] == [False, is_copied, is_copied]
    (changes,) = report["changes"]
    assert changes["equal"]
    assert changes["bits_equal"]
    assert changes["differ"] > 1e-4
    (in_flight,) = report["in_flight"]
    assert in_flight["tokens"] == [300]
    assert in_flight["most_versions"] == 2
    for scene in ("several", "in_flight", "cut"):
        assert report[scene][0]["bits_equal"]
    # It was not taken for whole.
    assert "the fetched weights end at byte" in loads[-2]["error"]
