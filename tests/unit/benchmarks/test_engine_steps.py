"""The times of an engine's steps, as benchmarks/rollout/engine_steps.py takes them."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from benchmarks.rollout import engine_steps  # noqa: E402


def test_steps_are_timed_once_that_was_asked_for(tmp_path: Path) -> None:
    steps = engine_steps._Steps(tmp_path)
    part = steps.timed("part", lambda: torch.ones(4).sum())
    step = steps.step(lambda: [part(), part()])
    for _ in range(3 * engine_steps._LOOKS_EVERY):
        step()
    assert engine_steps.found(tmp_path) is None
    engine_steps.begin(tmp_path)
    for _ in range(engine_steps._LOOKS_EVERY + sum(engine_steps._STEPS.values())):
        step()
    found = engine_steps.found(tmp_path)
    assert list(found) == ["plain", "synced", "profiled"]
    for mode in ("plain", "synced"):
        spent_ms, calls = found[mode]["parts_ms"]["part"]
        assert calls == 2
        assert 0 < spent_ms < found[mode]["step_ms"]
    sums = {name: count for name, _, count in found["profiled"]["calls_us"]}
    assert sums["aten::sum"] == 2
    said = "\n".join(engine_steps.lines(found))
    assert "ms a step" in said
    assert "2.00 calls  part" in said
