"""Which families are measured side by side, and how."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import check_sizes

from benchmarks.agreement import families
from benchmarks.agreement.families import Rooms, earlier_rows, lines_of, measure_family
from benchmarks.agreement.family_shapes import FAMILIES
from benchmarks.agreement.logprob_gap import config_of, parse_arguments

ARGUMENTS = argparse.Namespace(
    device="cpu", steps=1, limit_s=1.0, fresh=True, logs=None
)


def test_a_family_that_needs_more_than_a_gpu_has_it_alone() -> None:
    rooms = Rooms(1, 100.0, 6)
    with rooms.take(250.0) as gpu:
        assert (gpu, rooms._left) == (0, [0.0])
    assert rooms._left == [100.0]


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2.5-vl", "qwen3-moe", "qwen3-vl-moe", "gpt-oss"]
)
def test_towers_reply_behind_images_and_mixtures_are_measured_with_replay_too(
    name, tmp_path, monkeypatch
):
    noted: list[list[str]] = []

    def note(command: list[str], log: Path, **_: object) -> str:
        noted.append(command)
        if "--out" in command:
            figures = {"gap_mean": 0.5}
            if "--replay" in command:
                figures |= {"replayed_gap_mean": 0.25, "routing_difference": 0.01}
            Path(command[command.index("--out") + 1]).write_text(
                json.dumps({"figures": figures})
            )
        return ""

    monkeypatch.setattr(families, "run", note)
    row = measure_family(name, "float16", tmp_path / "family", 0, ARGUMENTS)
    last = noted[-1]
    replays = name in ("qwen3-moe", "qwen3-vl-moe", "gpt-oss")
    assert last[last.index("--dtype") + 1] == "float16"
    assert ("--images" in last) == bool(FAMILIES[name].tower)
    assert [("--replay" in command) for command in noted] == [False, replays]
    header, _, line = lines_of({name: row | {"measured": "today"}})
    cell = line.split("|")[header.split("|").index(" gap with router replay ")]
    assert (cell == " 0.25 ") == replays


def test_a_family_that_fails_leaves_the_reason_and_its_logs(tmp_path, monkeypatch):
    def fail(command: list[str], log: Path, **_: object) -> str:
        if "--out" not in command:
            return ""
        log.write_text("what was printed\n")
        (log.parent / "run" / "logs").mkdir(parents=True)
        (log.parent / "run" / "logs" / "server-0.log").write_text("out of memory\n")
        failures = {"the run": "Traceback\nRuntimeError: server-0 a|b\n"}
        report = json.dumps({"figures": {}, "failures": failures})
        Path(command[command.index("--out") + 1]).write_text(report)
        return "exit code 1"

    monkeypatch.setattr(families, "run", fail)
    arguments = argparse.Namespace(**vars(ARGUMENTS) | {"logs": tmp_path / "kept"})
    row = measure_family("qwen3", "bfloat16", tmp_path / "family", 0, arguments)
    assert row["failure"] == "exit code 1: RuntimeError: server-0 a|b"
    line = lines_of({"qwen3": row | {"measured": "today"}})[-1]
    assert line.endswith("| exit code 1: RuntimeError: server-0 a/b |")
    kept = (tmp_path / "kept" / "qwen3.log").read_text()
    assert "out of memory" in kept
    assert "what was printed" in kept


@pytest.mark.parametrize("tiny", [False, True], ids=["wide", "tiny"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_shape_that_is_trained(name, *, tiny, tmp_path, monkeypatch):
    family = FAMILIES[name]
    model = family.config(tiny=tiny)
    model.architectures = family.names.get("architectures", [family.architecture])
    model.save_pretrained(tmp_path / "model")
    command = [
        "logprob_gap.py",
        "--device",
        "cuda",
        "--replies",
        "--model",
        str(tmp_path),
    ]
    command += ["--images"] if family.tower else []
    command += ["--replay"] if family.replays else []
    monkeypatch.setattr(sys, "argv", command)
    check_sizes(config_of(parse_arguments(), tmp_path))


def test_rows_of_an_earlier_call_on_the_same_device_stay(tmp_path: Path) -> None:
    row = {"figures": {}, "failure": "", "seconds": 1.0, "measured": "today"}
    path = tmp_path / "families.json"
    assert earlier_rows(path, device="cuda", steps=3) == {}
    rows = {"qwen3-moe": row, "a family that is gone": row}
    path.write_text(json.dumps({"device": "cuda", "steps": 3, "rows": rows}))
    assert earlier_rows(path, device="cuda", steps=3) == {"qwen3-moe": row}
    assert earlier_rows(path, device="cpu", steps=3) == {}
    assert earlier_rows(path, device="cuda", steps=2) == {}
