"""What all benchmarks share."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.common import measure


def test_spread_is_the_median_with_least_and_greatest() -> None:
    spread = measure.Spread.of([0.003, 0.001, 0.010])
    assert spread == measure.Spread(0.003, 0.001, 0.010, 3)
    assert spread.text(1, scale=1000) == "3.0 (1.0-10.0)"
    with pytest.raises(ValueError, match="at least one"):
        measure.Spread.of([])


@pytest.mark.process
def test_result_says_machine_versions_and_command(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(
        sys, "argv", [str(measure.ROOT / "benchmarks/a/x.py"), "--repeats", "5"]
    )
    path = measure.write_result("x", {"figure": 1.5}, tmp_path / "results" / "x.json")
    result = json.loads(path.read_text())
    assert result["figure"] == 1.5
    assert result["command"] == "python -m benchmarks.a.x --repeats 5"
    assert result["machine"]["cores"] >= 1
    assert result["versions"]["torch"]
    assert json.loads((tmp_path / "out" / "x.json").read_text()) == result
    # A folder gets a file of the result's name.
    assert measure.write_result("x", {"figure": 2.5}, path.parent) == path


def test_result_does_not_say_where_files_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "--shape 8B --model-folder /m/8B --out=/o/x.json --repeats 5"
    program = str(measure.ROOT / "benchmarks/a/x.py")
    monkeypatch.setattr(sys, "argv", [program, *message.split()])
    assert measure.command() == "python -m benchmarks.a.x --shape 8B --repeats 5"
    arguments = argparse.Namespace(
        shape="8B", model_folder=Path("/m/8B"), out=Path("/o"), tp=2
    )
    assert measure.settings_of(arguments) == {"shape": "8B", "tp": "2"}


@pytest.mark.parametrize(
    ("seen", "shown"), [("", "1,0"), ("2,3", "3,2"), ("GPU-a,GPU-b", "GPU-b,GPU-a")]
)
def test_gpus_of_a_child_are_among_those_of_its_parent(seen, shown, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert measure.visible([1, 0]) == shown


def test_rows_are_written_while_a_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    measure.note("x", {"repeat": 1})
    measure.note("x", {"repeat": 2})
    assert [
        json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()
    ] == [
        {"repeat": 1},
        {"repeat": 2},
    ]


def test_failure_of_a_part_is_kept_and_the_next_part_runs(capsys):
    failures: dict[str, str] = {}
    with measure.part("first", failures):
        raise RuntimeError("no such GPU")
    with measure.part("second", failures):
        pass
    assert list(failures) == ["first"]
    assert "no such GPU" in failures["first"]
    assert "no such GPU" in capsys.readouterr().out
