"""Seeded runs on a virtual clock with faults; `tests/simulation/run.py` plays more of them."""

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from simulation import run, world
from simulation.mutants import MUTANTS, NAMED, catching_seed, mutated
from simulation.virtual_loop import Process
from simulation.world import CRASHES, Fault, Result, World, shared_memory
from support.rigs.completed import python

ROOT = Path(__file__).resolve().parents[2]
# A rule that is broken on purpose is noticed in the first 200 of these. The slow test plays 6,000
# more.
SEEDS = 600
# Beyond those: each broke a rule once.
BROKEN = (
    4181,
    9012,
    9460,
    10897,
    15279,
    17021,
    22093,
    22924,
    25886,
    44345,
    50067,
    64486,
    77180,
    78626,
    89599,
    89925,
    200343,
    1003373,
    1004001,
    1005552,
    1006201,
    7000231,
    7000491,
)
# Continuous integration spreads the parts over its processes.
PARTS = 10


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


def broken_rules(folder: Path, seeds: Iterable[int]) -> list[str]:
    """The first rule that each of these runs broke, with the command that plays it again."""
    violations_by_seed = (
        (seed, World(seed, folder).run().violations) for seed in seeds
    )
    again = "play it again: python tests/simulation/run.py --seeds"
    return [
        f"{broken[0]}; {again} {seed}:{seed + 1}"
        for seed, broken in violations_by_seed
        if broken
    ]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.long] * (part > 0))
        for part in range(PARTS)
    ],
)
def test_no_rule_breaks_whatever_fails(folder: Path, part: int) -> None:
    crashes = range(CRASHES + part, CRASHES + SEEDS // 10, PARTS)
    assert not broken_rules(
        folder, (*range(part, SEEDS, PARTS), *crashes, *BROKEN[part::PARTS])
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_rule_breaks_in_many_more_runs(folder: Path) -> None:
    crashes = range(CRASHES + SEEDS // 10, CRASHES + SEEDS)
    assert not broken_rules(folder, (*range(SEEDS, 11 * SEEDS), *crashes))


class StallingWorld(World):
    """A run in which one process stands still, or hears nothing, for `seconds`, and none ends."""

    seconds = 0.0

    def spawn(self, name: str) -> Process:
        if name.partition("/")[0] in self.processes and not self._is_over():
            self.violations.append(f"{name} is another start")
        return super().spawn(name)

    def fault_stopped_controller(self) -> bool:
        self.processes["controller"].stop(self.seconds)
        return True

    def fault_stopped_trainer(self) -> bool:
        self.processes["trainer"].stop(self.seconds)
        return True

    def fault_cut_trainer(self) -> bool:
        name = self.processes["trainer"].name
        self.network.cut |= {(name, "controller"), ("controller", name)}
        self._later(self.network.heal, self.seconds, self.seconds)
        return True


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        ("stopped_controller", 56.0),
        ("stopped_controller", 500.0),
        ("cut_trainer", 45.0),
        ("cut_trainer", 180.0),
        ("stopped_trainer", 330.0),
    ],
)
def test_a_stall_is_no_failure(
    folder: Path, monkeypatch, fault: str, seconds: float
) -> None:
    monkeypatch.setattr(StallingWorld, "seconds", seconds)
    monkeypatch.setattr(world, "LIMIT_S", seconds + 60.0)
    shape, _ = world.some_faults(1)
    shape = replace(shape, steps=4, servers=1, checkpoint_every=1, has_client=False)
    for at_s in (1.5, 3.0, 4.5):
        faults = [Fault(at_s, fault)]
        stalling = StallingWorld(7, folder, planned=(shape, faults))
        assert stalling.run().violations == []
        assert stalling.fired[fault.replace("_", " ")] == 1


class FailingWorld:
    """Fails in one seed, and ends its process in another."""

    def __init__(self, seed: int, *_: object, **__: object) -> None:
        self.seed = seed

    def run(self) -> Result:
        if self.seed == 3:
            raise ValueError("odd")
        if self.seed == 4:
            os._exit(9)
        return Result(self.seed, [], "", Counter(), 0.0, Counter(steps=1))


def test_a_schedule_that_ends_its_process_is_named_and_the_rest_played(
    folder, monkeypatch
) -> None:
    monkeypatch.setattr(run, "World", FailingWorld)
    plays = list(run.Schedules(folder, verbose=False).play(range(12), 2))
    assert sorted(result.seed for result in plays) == list(range(12))
    failed = {result.seed: result.violations for result in plays if result.violations}
    assert failed == {
        3: ["the rig failed: ValueError: odd"],
        4: ["its process ended with 9"],
    }


def test_no_schedule_begins_after_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "World", FailingWorld)
    assert not list(
        run.Schedules(folder, until_s=0.0, verbose=False).play(range(12), 2)
    )


@pytest.mark.long
def test_a_seed_plays_the_same_run_in_every_process(folder: Path) -> None:
    seeds = range(6)
    program = (
        "from pathlib import Path; from simulation.world import World\n"
        f"print([World(seed, Path({str(folder)!r})).run().digest for seed in {seeds}])"
    )
    process = python(
        program, env={"PYTHONPATH": f"{ROOT}/tests", "PYTHONHASHSEED": "1"}, check=True
    )
    assert process.stdout.strip() == str(
        [World(seed, folder).run().digest for seed in seeds]
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_what_can_be_broken_on_purpose_is_still_there(name: str) -> None:
    with mutated(name):
        pass


@pytest.mark.parametrize("name", NAMED)
def test_what_is_broken_on_purpose_is_noticed(folder: Path, name: str) -> None:
    assert catching_seed(name, (NAMED[name], *range(SEEDS)), folder.parent) is not None
