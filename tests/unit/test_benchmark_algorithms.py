"""The comparison of algorithms, without its runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from quickstart_runs import CONFIG
from slipstream.core.configuration.config_file import load_config

FILE = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_algorithms", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = load()


@pytest.mark.parametrize("name", BENCHMARK.ALGORITHMS)
def test_settings_of_every_algorithm_are_valid_and_its_own(name: str) -> None:
    config = load_config(CONFIG, BENCHMARK.ALGORITHMS[name])
    others = [load_config(CONFIG, o) for n, o in BENCHMARK.ALGORITHMS.items() if n != name]
    assert config not in others
    assert config.algorithm.staleness_warning is None


def test_goal_is_reached_when_a_window_of_steps_has_it_as_its_mean() -> None:
    rewards = [0.5, 0.8, 0.9, 0.9, 0.95, 0.95, 0.9]
    assert BENCHMARK.steps_to_goal(rewards) == 6
    assert BENCHMARK.steps_to_goal([0.89] * 20) is None
    assert BENCHMARK.steps_to_goal([1.0] * 4) is None
