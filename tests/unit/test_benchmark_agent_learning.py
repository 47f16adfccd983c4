"""The comparison of agent and environment goes on where it was cut off, and tells its errors."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import agent_learning
import pytest
import quickstart_runs
from quickstart_runs import CONFIG, Run, finished_run
from slipstream.core.configuration.config_file import load_config

LEDGER = {"difference": 0}


def asked(**changes: object) -> argparse.Namespace:
    plain = {
        "repeats": 1,
        "steps": 12,
        "evaluate_every": 75,
        "staleness": None,
        "kinds": list(agent_learning.AGENTS),
        "device": "cpu",
        "gpus": 1,
        "workers": 1,
        "side_by_side": False,
        "limit_s": math.inf,
        "smollm2": None,
    }
    return argparse.Namespace(**plain | changes)


def write_run(folder: Path, name: str, *, steps: int, state: str = "finished") -> Run | None:
    row = {"trained_tokens": 10, "lag_mean": 0.5}
    rows = [{"step": s, "wall_s": 2.0 * s, **row} for s in range(1, steps + 1)]
    evaluation = {"reward_heldout": 0.5, "echo-heldout/reward_std": 0.2, "num_episodes": 400}
    rows.append({"evaluation_step": steps, **evaluation})
    (folder / name).mkdir()
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "summary.json").write_text(json.dumps({"state": state, "ledger": LEDGER}))
    return finished_run(folder, name)


def test_only_a_run_with_all_its_steps_is_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path, "whole", steps=12)
    write_run(tmp_path, "stopped", steps=12, state="stopped")
    assert run is not None
    assert run.wall_s == 24.0
    assert finished_run(tmp_path, "stopped") is None
    assert finished_run(tmp_path, "never begun") is None


def test_a_comparison_that_was_cut_off_runs_only_what_is_missing(tmp_path: Path) -> None:
    started: list[str] = []
    written: list[int] = []
    (tmp_path / "model").mkdir()

    def start(folder: Path, name: str, *_: object, **__: object) -> object:
        started.append(name)
        if len(started) == 2:
            raise subprocess.TimeoutExpired(name, 1.0)
        return write_run(folder, name, steps=12)

    found, failures = agent_learning.measure(
        tmp_path,
        asked(),
        start=start,
        write=lambda found, _: written.append(sum(map(len, found.values()))),
    )
    assert [len(runs) for runs in found.values()] == [1, 0, 1]
    assert list(failures) == ["agent, repeat 0"]
    assert written == [1, 1, 2]
    found, failures = agent_learning.measure(tmp_path, asked(), start=start)
    assert started == ["environment-0", "agent-0", "bare-0", "agent-0"]
    assert [len(runs) for runs in found.values()] == [1, 1, 1]
    assert not failures
    assert found["agent"][0] == {
        "repeat": 0,
        "heldout": {12: 0.5},
        "last": 0.5,
        "last_error": pytest.approx(0.01),
        "tokens_per_s": 20 / 4.0,
        "wall_s": 24.0,
        "step_cpu_s": None,
        "lag": 0.5,
        "difference": 0,
    }


def test_a_finished_run_goes_on_when_more_steps_are_asked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for kind in agent_learning.KINDS:
        write_run(tmp_path, f"{kind}-0", steps=12)
    started: list[str] = []

    def start(folder: Path, name: str, *_: object, **__: object) -> object:
        started.append(name)
        return finished_run(folder, name)

    agent_learning.measure(tmp_path, asked(steps=20), start=start)
    assert started == ["environment-0", "agent-0", "bare-0"]


def test_runs_side_by_side_share_the_gpus_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (tmp_path / "model").mkdir()
    kinds = ["environment", "agent"]
    gpus: dict[str, str] = {}
    all_run = threading.Barrier(6)

    def start(
        folder: Path, name: str, settings: list[str], *, environ: dict[str, str], **_: object
    ) -> object:
        gpus[name] = environ["CUDA_VISIBLE_DEVICES"]
        assert "model.dtype=bfloat16" in settings
        all_run.wait(60)
        return write_run(folder, name, steps=12)

    arguments = asked(repeats=3, kinds=kinds, device="cuda", gpus=2, side_by_side=True)
    found, failures = agent_learning.measure(tmp_path, arguments, start=start)
    assert not failures
    assert {kind: sorted(one["repeat"] for one in runs) for kind, runs in found.items()} == {
        "environment": [0, 1, 2],
        "agent": [0, 1, 2],
    }
    for kind in kinds:
        assert {gpus[f"{kind}-{repeat}"] for repeat in range(3)} == {"4", "5"}
    assert sorted(gpus.values()) == ["4", "4", "4", "5", "5", "5"]


@pytest.mark.parametrize("kind", list(agent_learning.KINDS))
def test_the_settings_of_a_run_on_a_gpu_are_those_of_the_quickstart_with_little_memory(
    kind: str,
) -> None:
    arguments = asked(device="cuda", workers=2, steps=150)
    plain = load_config(CONFIG)
    config = load_config(CONFIG, agent_learning.settings_for(kind, 2, arguments))
    assert config.rollout_server.engine == {"kv_cache_memory_bytes": 1 << 28}
    assert config.run.seed == 3
    assert config.algorithm == plain.algorithm
    assert config.sampling == plain.sampling
    (evaluation,) = config.evaluations
    assert (evaluation.num_episodes, evaluation.every_steps) == (1040, 75)
    assert evaluation.args == plain.evaluations[0].args
    assert config.environments[0].num_workers == evaluation.num_workers == 2


@pytest.mark.parametrize("kind", ["bf16", "drafts", "fp8"])
def test_smollm2_learns_by_the_settings_of_its_file(tmp_path: Path, kind: str) -> None:
    arguments = asked(device="cuda", smollm2=tmp_path, steps=40, evaluate_every=10)
    plain = load_config(agent_learning.SMOLLM2)
    config = load_config(agent_learning.SMOLLM2, agent_learning.settings_for(kind, 1, arguments))
    assert (config.run.seed, config.run.steps) == (2, 40)
    assert config.algorithm == plain.algorithm
    assert config.sampling == plain.sampling
    assert config.environments == plain.environments
    (evaluation,) = config.evaluations
    assert (evaluation.num_episodes, evaluation.every_steps) == (512, 10)


def test_smollm2_takes_the_place_of_the_tiny_model(tmp_path: Path) -> None:
    smollm2 = tmp_path / "smollm2"
    smollm2.mkdir()
    (tmp_path / "runs").mkdir()
    configs: list[Path] = []

    def start(folder: Path, name: str, *_: object, config: Path, **__: object) -> object:
        configs.append(config)
        return write_run(folder, name, steps=12)

    arguments = asked(smollm2=smollm2, kinds=["bf16"])
    assert not agent_learning.measure(tmp_path / "runs", arguments, start=start)[1]
    assert (tmp_path / "runs" / "model").resolve() == smollm2
    assert configs == [agent_learning.SMOLLM2]


def figures_of(*last: float) -> list[dict[str, object]]:
    same = {"last_error": 0.005, "tokens_per_s": 100.0, "step_cpu_s": 1.5, "lag": 0.5}
    return [{"last": value, "heldout": {0: 0.1, 10: value}, **same} for value in last]


def test_a_difference_comes_with_its_standard_error() -> None:
    # Deviations of 0.01: each mean has an error of 0.01 / sqrt(3) = 0.0058, both of 0.0082.
    found = {"environment": figures_of(0.80, 0.81, 0.82), "agent": figures_of(0.83, 0.82, 0.84)}
    rows = [line.strip("| ").split(" | ") for line in agent_learning.lines_of(found)[2:]]
    assert rows[0][:6] == ["environment", "3", "0.810 +- 0.006", "0.800-0.820", "0.005", "-"]
    assert rows[1][:6] == ["agent", "3", "0.830 +- 0.006", "0.820-0.840", "0.005", "0.020 +- 0.008"]


def test_a_curve_is_the_mean_of_the_rounds_after_the_first_step() -> None:
    rounds = {"0": 0.1, "10": 0.4, "20": 0.8}
    (run,) = figures_of(0.8)
    assert agent_learning.mean_of_rounds(run | {"heldout": rounds}) == pytest.approx(0.6)


def test_one_run_of_a_kind_has_no_error() -> None:
    found = {"environment": figures_of(0.8), "agent": figures_of(0.7), "bare": []}
    lines = agent_learning.lines_of(found)
    assert len(lines) == 4
    assert "| -0.100 +- ? |" in lines[3]


def test_all_kinds_can_train_on_the_newest_version_alone() -> None:
    for kind in agent_learning.KINDS:
        settings = agent_learning.settings_for(kind, 0, asked(staleness=0, evaluate_every=0))
        config = load_config(CONFIG, settings)
        assert config.algorithm.max_staleness == 0
        assert config.evaluations[0].every_steps == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "limit_s", "expected"),
    [
        ("import sys; sys.exit('broken')", 60.0, lambda: pytest.raises(RuntimeError, match="brok")),
        ("import time; time.sleep(60)", 0.2, lambda: pytest.raises(subprocess.TimeoutExpired)),
    ],
    ids=["fails", "too long"],
)
def test_a_run_that_does_not_finish_is_told(
    tmp_path: Path, program: str, limit_s: float, expected: Callable[[], object]
) -> None:
    command = [sys.executable, "-c", program, "", "", "run.name=r"]
    with expected():
        quickstart_runs._run_to_end(command, os.environ, tmp_path, limit_s)  # noqa: SLF001
