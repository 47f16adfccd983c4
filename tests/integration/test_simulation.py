"""Seeded runs on a virtual clock with faults; `tests/simulation/run.py` plays more of them."""

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.mutants import NAMED, catching_seed
from simulation.world import World, shared_memory

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 700
# Continuous integration spreads the parts over its processes.
PARTS = 5


@pytest.fixture(autouse=True, scope="module")
def collects_again() -> Iterator[None]:
    """Simulated runs choose themselves when to collect; tests behind them do not."""
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=shared_memory()) as parent:
        yield Path(parent) / "run"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_rule_breaks_whatever_fails(folder: Path, part: int) -> None:
    wrong = []
    for seed in range(part, SEEDS, PARTS):
        found = World(seed, folder).run().violations
        if found:
            command = f"python tests/simulation/run.py --seeds {seed}:{seed + 1}"
            wrong.append(f"{found[0]}; play it again: {command}")
    assert not wrong


def test_a_seed_plays_the_same_run_in_every_process(folder: Path) -> None:
    seeds = range(6)
    program = (
        "from pathlib import Path; from simulation.world import World\n"
        f"print([World(seed, Path({str(folder)!r})).run().digest for seed in {seeds}])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{ROOT}/tests", "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str([World(seed, folder).run().digest for seed in seeds])


@pytest.mark.parametrize("name", NAMED)
def test_what_is_broken_on_purpose_is_noticed(folder: Path, name: str) -> None:
    assert catching_seed(name, range(SEEDS), folder.parent) is not None
