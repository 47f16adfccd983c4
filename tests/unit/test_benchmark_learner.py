from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from slipstream.protocol.config_file import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learner", ROOT / "benchmarks" / "learner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_holds_medians_and_their_ratios(benchmark: ModuleType) -> None:
    def repeats(*walls: float) -> list[dict[str, float]]:
        return [{"wall_ms": wall, "cpu_ms": wall / 2} for wall in walls]

    found = {"slipstream": repeats(22, 90, 21), "bare": repeats(20, 19, 40)}
    lines = benchmark.table(found).splitlines()
    assert lines[2] == "| slipstream | 22.00 (21.00-90.00) | 11.00 | 1.100 | 1.100 |"
    assert lines[3] == "| bare | 20.00 (19.00-40.00) | 10.00 | 1.000 | 1.000 |"


def test_batch_is_as_large_as_the_quickstarts(benchmark: ModuleType) -> None:
    config = load_config(ROOT / "deploy" / "configs" / "quickstart.toml")
    batch = benchmark.make_batch(config, 2)
    batch.check(config.algorithm.max_staleness)
    assert len(batch.trajectories) == 256
    assert {len(t.token_ids) for t in batch.trajectories} == {8}
