"""What is read of a run, and the engine that is found behind its replies."""

import asyncio
import dataclasses
import json
import random
import shutil
import statistics
from pathlib import Path

import pytest
from slipstream.client.run_folder import write_config
from slipstream.core.errors import ConfigError
from slipstream.extensions.what_if import predict as program
from slipstream.extensions.what_if.measured import MeasuredRun, find_speed, read_run
from slipstream.extensions.what_if.predict import predict
from slipstream.extensions.what_if.simulation import (
    EngineSpeed,
    Episode,
    FleetSizes,
    Simulation,
    Work,
)
from support.fakes.fake_server import FakeServer
from support.rigs.controller_runs import make_config, play

FLEET = FleetSizes(
    num_servers=1,
    max_episodes=64,
    groups_per_step=4,
    max_staleness=1,
)
STEPS = 16


def lengths_of_groups() -> list[list[Episode]]:
    """Groups of eight lognormal lengths of a mean of some 70 tokens."""
    drawn = random.Random(3)
    groups = []
    for _ in range(80):
        lengths = [max(1, round(50 * drawn.lognormvariate(0, 0.8))) for _ in range(8)]
        groups.append([Episode(tokens=length, rest_s=0.01) for length in lengths])
    return groups


@pytest.mark.parametrize(
    "speed",
    [
        EngineSpeed(step_s=2e-3, reply_s=0.0),
        EngineSpeed(step_s=1e-3, reply_s=5e-5),
        EngineSpeed(step_s=0.0, reply_s=1e-4),
    ],
    ids=["by step", "both", "by reply"],
)
def test_an_engine_is_found_by_which_other_settings_are_predicted(
    speed: EngineSpeed,
) -> None:
    work = Work(
        groups=lengths_of_groups(),
        groups_per_step=FLEET.groups_per_step,
        training_s=[0.2],
        other_s=[0.02],
        pause_s=0.01,
    )
    true = Simulation(work, speed, FLEET, num_steps=80).run()
    measured = MeasuredRun(
        work=work,
        first_step=1,
        last_step=80,
        step_s=true.step_s,
        tokens_per_s=true.tokens_per_s,
        lag_mean=true.lag_mean,
        trainer_waits=true.trainer_waits,
        servers_idle=true.servers_idle,
        servers_paused=0.0,
        generation=true.generation,
    )
    found_speed = find_speed(measured, FLEET, num_steps=80)
    for other in (
        FleetSizes(num_servers=2, max_episodes=64, groups_per_step=4, max_staleness=0),
        FleetSizes(num_servers=1, max_episodes=64, groups_per_step=8, max_staleness=4),
    ):
        expected = Simulation(work, speed, other, num_steps=80).run()
        prediction = Simulation(work, found_speed, other, num_steps=80).run()
        assert prediction.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=0.08)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = make_config(folder, run__steps=STEPS)
    server = FakeServer(config.controller.address)
    server.generation_s = 0.05
    asyncio.run(play(config, server))
    write_config(config, config.run_dir)
    return config.run_dir


@pytest.fixture
def run_copy(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "copy"))


def test_a_run_is_read_behind_its_warm_up(whole_run: Path) -> None:
    measured = read_run(whole_run, groups_per_step=4)
    # A quarter of 16 steps is left out; each has four groups of four members of five tokens.
    assert (measured.first_step, measured.last_step) == (5, 16)
    assert len(measured.work.groups) == 12 * 4
    assert {len(group) for group in measured.work.groups} == {4}
    assert [tokens for tokens, _ in measured.generation] == [5] * 12 * 16
    rows = [
        json.loads(line)
        for line in (whole_run / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if row.get("step", 0) >= 5]
    step_s = statistics.fmean(row["step_s"] for row in steps)
    assert measured.step_s == pytest.approx(step_s)
    assert measured.tokens_per_s == pytest.approx(16 * 5 / step_s)
    assert measured.lag_mean == pytest.approx(
        statistics.fmean(row["lag_mean"] for row in steps)
    )


def test_steps_without_a_batch_count_in_no_mean(run_copy: Path) -> None:
    for step in (4, 5, 9):
        (run_copy / "journal" / "batches" / f"step-{step:06d}.pb").unlink()
    measured = read_run(run_copy, groups_per_step=4)
    assert (measured.first_step, measured.last_step) == (7, 16)
    assert len(measured.work.training_s) == 9
    assert measured.tokens_per_s == pytest.approx(16 * 5 / measured.step_s)


def test_a_prediction_stands_beside_what_was_measured(
    whole_run, monkeypatch, capsys
) -> None:
    arguments = ["predict", f"--folder={whole_run}", "algorithm.max_staleness=0"]
    monkeypatch.setattr("sys.argv", arguments)
    assert program.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("steps 5 to 16, and ")
    assert lines[1].split() == ["measured", "simulated", "with", arguments[-1]]
    lags = next(line for line in lines if line.startswith("mean lag")).split()
    assert lags[-1] == "0.00"
    assert float(lags[-2]) > 0


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (
            "algorithm.loss=gspo",
            r"--if takes rollout_server\.count, .*, got algorithm\.loss",
        ),
        ("algorithm.max_staleness=-1", "algorithm.max_staleness: .* got -1"),
        ("rollout_server.count=none", "rollout_server.count: "),
        ("rollout_server.max_episodes=3", "max_episodes"),
    ],
)
def test_a_setting_without_a_prediction_is_refused(whole_run, change, refusal) -> None:
    with pytest.raises(ConfigError, match=refusal):
        predict(whole_run, [change])


def test_a_run_without_steps_or_batches_is_refused(run_copy: Path) -> None:
    metrics = run_copy / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:10]))
    with pytest.raises(
        ConfigError, match="predictions need 12 steps, and .* has 10 of"
    ):
        predict(run_copy, ["algorithm.max_staleness=4"])
    metrics.write_text("".join(lines))
    shutil.rmtree(run_copy / "journal" / "batches")
    with pytest.raises(
        ConfigError, match=r"has no batches of steps 5 to 16.*keep_batches"
    ):
        predict(run_copy, ["algorithm.max_staleness=4"])


def test_replies_without_a_time_predict_nothing(whole_run: Path) -> None:
    measured = read_run(whole_run, groups_per_step=4)
    instant = dataclasses.replace(measured, generation=((5, 0.0), (5, 0.0)))
    with pytest.raises(ConfigError, match="replies took no time in the engine"):
        find_speed(instant, FLEET, num_steps=8)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ("controller.client_loop=true", "a client's own loop orders its steps itself"),
        ('algorithm.filter="unequal_rewards"', "leaves groups out, whose lengths"),
    ],
)
def test_a_run_that_the_simulation_does_not_know_is_refused(
    tmp_path, settings, refusal
) -> None:
    name, _, value = settings.partition("=")
    changes = {name.replace(".", "__"): json.loads(value)}
    if "client_loop" in name:
        changes["learner__shared_prefix_tokens"] = 0
    config = make_config(tmp_path, **changes)
    config.run_dir.mkdir()
    write_config(config, config.run_dir)
    with pytest.raises(ConfigError, match=refusal):
        predict(config.run_dir, ["algorithm.max_staleness=4"])
