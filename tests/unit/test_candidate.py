"""The command that proves other versions of packages."""

from pathlib import Path

import candidate
import pytest

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.a" name="test_three"><failure message="it&#10;differs"/></testcase>
<testcase classname="tests.a" name="test_four"><error message="it&#10;is gone"/></testcase>
</testsuite></testsuites>"""


def test_every_part_names_tests_that_are_there() -> None:
    for part, files in candidate.PARTS.items():
        for path in candidate.paths(part):
            assert (candidate.ROOT / path).exists(), f"{part}: {path} of {files}"
    assert set(candidate.SLOW) <= set(candidate.PARTS)


@pytest.mark.parametrize(
    "pin", ["torch", "torch>=2", "torch==2 --index-url=x", "-rother.txt"]
)
def test_what_is_no_exact_pin_is_refused_before_anything_is_installed(
    pin: str, tmp_path
) -> None:
    with pytest.raises(SystemExit, match="a pin must be NAME==VERSION, got"):
        candidate.main([f"--folder={tmp_path / 'new'}", "--", pin])
    assert not (tmp_path / "new").exists()


def test_a_report_names_versions_parts_and_tests_that_failed(tmp_path: Path) -> None:
    junit = tmp_path / "gaps.xml"
    junit.write_text(JUNIT)
    report = candidate.read(junit, 3.4, 1)
    assert (report.passed, report.skipped, report.holds) == (1, 1, False)
    broken = candidate.read(tmp_path / "missing.xml", 1.0, 0)
    assert not broken.holds, "a part of which no test ran proves nothing"
    text = candidate.report({"gaps": report, "runs": broken})
    assert "| gaps | **fails** | 1 | 2 | 1 | 3 |" in text
    assert "- `tests.a::test_three` and 1 more: it" in text
    assert "Not run: patches, " in text
