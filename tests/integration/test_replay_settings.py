"""Replays of a recorded run with other settings, and the search for the group at fault.

One rank records runs of a tiny model by the trainer's own step, and trains them again.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from slipstream.core.run_folder import JOURNAL
from slipstream.learner.trainer.recorded_run import recorded_steps
from support.fakes.tiny_models import make_model_folder
from support.ranks import replay_ranks
from support.ranks.rank_pool import RankPool
from support.ranks.replay_ranks import (
    NUM_GROUPS,
    POISONED_GROUP,
    POISONED_MEMBER,
    POISONED_STEP,
    STEPS,
)

OTHER = {
    "loss": "gspo",
    "learning_rate": 2e-3,
    "mini_batches": 2,
}
# Each makes another step of the same batches, and none changes what is sampled.
SINGLE = {
    "algorithm.mini_batches": 2,
    "algorithm.advantage": "rloo",
    "algorithm.weight": "sequence",
    "algorithm.epochs": 2,
    "algorithm.entropy_coefficient": 0.01,
    "learner.weight_decay": 0.1,
}
OTHER_OPTIONS = [f"--other=algorithm.{name}={value}" for name, value in OTHER.items()]
OTHER_RATE = "algorithm.learning_rate=2e-3"
RECORDED_RATE = "algorithm.learning_rate=1e-3"
EXPLAINED_OPTIONS = [
    "--to=1",
    OTHER_RATE,
    f"--other={RECORDED_RATE}",
]
POISON = ["--metric=importance_ratio_max>1000", "--step=2"]
NO_POISON = ["--metric=entropy>0", "--step=2"]


def job(*parts: object) -> str:
    return json.dumps(parts)


JOBS = [
    job("record", "run", {}, False),
    job("record", "other", OTHER, False),
    job("record", "poisoned", {}, True),
    *(job("record", name, {}, False, {name: value}) for name, value in SINGLE.items()),
    *(
        job("replay", "run", [f"--other={name}={value}"], f"what if {name}")
        for name, value in SINGLE.items()
    ),
    job("replay", "run", ["--from=3"], "replayed"),
    job("replay", "run", ["--from=1", *OTHER_OPTIONS], "compared"),
    job("replay", "run", ["--from=3", "--to=3", f"--other={OTHER_RATE}"], "tail"),
    job("replay", "run", ["--to=2", OTHER_RATE], "different"),
    job("replay", "run", EXPLAINED_OPTIONS, "explained"),
    job("bisect", "poisoned", POISON, "found"),
    job("bisect", "poisoned", [*POISON, "--from=1"], "found-of-two-steps"),
    job("bisect", "run", NO_POISON, "nothing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    folder = tmp_path_factory.mktemp("replays")
    make_model_folder(folder / "model")
    program = Path(replay_ranks.__file__)
    rank_pool.run(program, JOBS, world_size=1, folder=folder)
    return folder


@dataclass(frozen=True)
class Answer:
    """The exit code of a job, and the lines that the command shows."""

    code: int
    lines: list[str]

    def beginning(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]

    @property
    def digests(self) -> list[str]:
        """Digest and verdict of each version."""
        parts = [line.split(maxsplit=2) for line in self.lines]
        return [rest for _, version, rest in parts if version.isdigit()]


def answer_of(folder: Path, job: str) -> Answer:
    text = folder.joinpath(f"{job}.txt").read_text()
    code, *lines = text.splitlines()
    shown = [line for line in lines if line.startswith(("version ", "bisect: "))]
    return Answer(int(code), shown)


def digests_of(folder: Path, run: str) -> list[str]:
    steps = recorded_steps(folder / run / JOURNAL)
    return [str(step.digest) for step in steps]


def test_a_replay_from_a_checkpoint_gets_the_recorded_digests(folder: Path) -> None:
    answer = answer_of(folder, "replayed")
    digests = digests_of(folder, "run")[2:]
    assert answer.code == 0
    assert answer.digests == [f"{digest}  as recorded" for digest in digests]


def test_other_settings_give_the_weights_of_a_run_that_had_them(folder: Path) -> None:
    answer = answer_of(folder, "compared")
    digests = digests_of(folder, "other")
    assert answer.code == 0
    assert answer.digests == [f"{digest}  by the other settings" for digest in digests]
    assert not any("the run's own settings give" in line for line in answer.lines)


@pytest.mark.parametrize("name", SINGLE)
def test_one_other_setting_gives_the_weights_of_a_run_that_had_it(
    folder: Path, name: str
) -> None:
    answer = answer_of(folder, f"what if {name}")
    digests = digests_of(folder, name)
    assert digests != digests_of(folder, "run")
    assert answer.digests == [f"{digest}  by the other settings" for digest in digests]


def test_each_step_shows_its_change_and_its_metrics_beside_the_original(
    folder: Path,
) -> None:
    answer = answer_of(folder, "compared")
    for version in range(1, STEPS + 1):
        start = f"version {version}: "
        step_change, total_change, metrics = answer.beginning(start)
        assert step_change.startswith(f"{start}change by step {version}: cosine 0.")
        assert total_change.startswith(f"{start}change since version 0: cosine 0.")
        assert "learning_rate 0.002 for 0.001" in metrics


def test_a_first_update_of_twice_the_rate_has_the_same_direction_and_twice_the_norm(
    folder: Path,
) -> None:
    answer = answer_of(folder, "tail")
    start = "version 3: change by step 3: cosine "
    (change,) = answer.beginning(start)
    numbers = change.removeprefix(start)
    cosine, _, norms = numbers.partition(", norm ")
    norm, _, original_norm = norms.partition(" for ")
    assert answer.code == 0
    assert float(cosine) == pytest.approx(1.0, abs=1e-4)
    assert float(norm) == pytest.approx(2 * float(original_norm), rel=1e-2)


def test_a_replay_that_differs_shows_metrics_and_how_far_from_a_checkpoint(
    folder: Path,
) -> None:
    answer = answer_of(folder, "different")
    digests = digests_of(folder, "run")[:2]
    verdicts = [text.split(maxsplit=1)[1] for text in answer.digests]
    assert answer.code == 1
    assert verdicts == [f"recorded {digest}" for digest in digests]
    assert any("learning_rate 0.002 for 0.001" in line for line in answer.lines)

    start = "version 1: change since version 0 beside that of the checkpoint: cosine "
    (change,) = answer.beginning(start)
    cosine, _, _ = change.removeprefix(start).partition(",")
    assert float(cosine) == pytest.approx(1.0, abs=1e-4)
    assert answer.lines[-1].startswith(
        "version digests that differ: 2, by other packages"
    )


def test_settings_of_an_earlier_start_reach_the_recorded_digests(folder: Path) -> None:
    answer = answer_of(folder, "explained")
    digest = digests_of(folder, "run")[0]
    assert answer.code == 0
    assert answer.digests == [f"{digest}  as recorded"]
    assert answer.lines[-1].startswith("version 1: the run's own settings give ")
    assert answer.lines[-1].endswith(f" here, recorded {digest}")


@pytest.mark.parametrize(
    ("job", "max_trials"),
    [
        ("found", 6),
        ("found-of-two-steps", 7),
    ],
)
def test_a_poisoned_sample_is_named_with_its_step_and_group(
    folder: Path,
    job: str,
    max_trials: int,
) -> None:
    answer = answer_of(folder, job)
    assert answer.code == 0, answer.lines
    group, sample = answer.beginning("bisect: found: ")
    name = f"group g{POISONED_GROUP:06d} of step {POISONED_STEP}, environment "
    assert name in group
    assert sample.startswith(f"bisect: found: sample {POISONED_MEMBER}, reward ")

    lines = answer.lines[: answer.lines.index(group)]
    trials = [line for line in lines if re.match(r"bisect: \d+\. with", line)]
    assert 1 < len(trials) <= max_trials


def test_a_metric_that_no_group_broke_names_none(folder: Path) -> None:
    answer = answer_of(folder, "nothing")
    assert answer.code == 1
    assert not answer.beginning("bisect: found: ")
    assert f"{NUM_GROUPS} groups of step 2 are suspects" in answer.lines[0]
    assert "several are at fault together" in answer.lines[-2]
