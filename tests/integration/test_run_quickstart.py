"""One short run with all real parts, and everything that it leaves."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from support.references.documented_metrics import tables
from support.references.page_data import given_of
from support.rigs.run_processes import (
    batches_of,
    checked,
    copy_environments,
    plain_loop,
    records_of,
    rows_of,
    run_command,
    succeed,
    summary_of,
    write_config,
)

pytestmark = pytest.mark.usefixtures("nothing_survives")

STEPS = 8
GROUPS = 16
MEMBERS = 16
ENVIRONMENTS = [
    {
        "name": "echo",
        "reference": "slipstream.environments.echo:Echo",
        "args": {"num_symbols": 12, "reply_length": 4, "split": "train"},
        "weight": 3.0,
        "timeout_s": 10.0,
    },
    {"name": "repeat", "reference": "user_environments:Repeat", "timeout_s": 10.0},
]
# Our own lines: a time and what happened, or the table at the end.
# An environment's line is there when its process takes three seconds, as on a busy machine.
SHOWN = re.compile(
    r" *\d+\.\d s  \S.*|  [a-z][a-z -]+  \S.*|  \S+/: .*"
    r"|environment [a-z-]+ is (loaded,|checked, each call) within \d+ s|replies end at .*"
    r"|run \S+ is checked: .*|"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_environments(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def result(folder: Path, tiny_model: Path) -> subprocess.CompletedProcess[str]:
    write_config(
        folder,
        tiny_model,
        run__steps=STEPS,
        environments=ENVIRONMENTS,
        controller__sample_every_steps=5,
        weights__verify_every=4,
    )
    return run_command("run", "config.toml", cwd=folder, limit_s=500)


@pytest.fixture(scope="module")
def run(folder: Path, result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def summary(run: Path) -> dict:
    return summary_of(run)


def test_the_summary_answers_what_people_ask_first(summary: dict) -> None:
    assert summary["steps"] == STEPS
    assert summary["state"] == "finished"
    for name in (
        "reward_first",
        "reward_last",
        "reward_heldout",
        "reward_heldout_first",
    ):
        assert 0 <= summary[name] <= 1
    # A server that is late on a busy machine is left out of a publish and takes the next one.
    assert summary["publishes"] >= 1
    # The first one, and every fourth after it.
    assert summary["publishes_verified"] >= math.ceil(summary["publishes"] / 4)
    assert summary["probe_gap_max"] <= 1e-3
    assert summary["published_bytes"] > 0
    trainer = summary["time"]["trainer"]
    servers = summary["time"]["servers"]
    assert sum(trainer.values()) == pytest.approx(1, abs=0.05)
    assert sum(servers.values()) == pytest.approx(1, abs=0.05)
    assert trainer["training"] > 0
    assert servers["sampling"] > 0
    assert summary["wall_s"] > 0
    assert len(summary["weight_digest"]) == 32


def test_every_metric_is_documented_and_every_documented_metric_is_there(
    run: Path,
) -> None:
    # The third table says what the metrics of the others must keep.
    of_each_step, of_some_steps, _ = tables("A step in metrics.jsonl")
    times, shares = tables("Why is it slow", "guides/watching.md")
    always = of_each_step + times
    sometimes = of_some_steps + shares
    rows = [row for row in rows_of(run) if "step" in row]
    settings = {
        name for row in rows for name in row if name.split("/")[0] in ("echo", "repeat")
    }
    assert {"echo/reward", "echo/right", "repeat/reward"} <= settings
    for row in rows:
        rest = set(row) - settings
        assert {name for name in always if "/" not in name} <= rest
        assert rest <= {*always, *sometimes}
        assert rest.isdisjoint({"mfu", "gpu_allocated_bytes", "gpu_reserved_bytes"})


def test_every_number_of_an_evaluation_is_documented(run: Path) -> None:
    shared, own_names = tables("An evaluation round in metrics.jsonl")
    (row, *_) = (row for row in rows_of(run) if "evaluation_step" in row)
    measured = {name.split("/", 1)[1] for name in row if "/" in name}
    assert {name for name in row if "/" not in name} == set(shared)
    assert {name.replace("_K", "_1") for name in own_names} <= measured


def test_the_summary_is_documented(summary: dict) -> None:
    (names,) = tables("summary.json")
    assert set(summary) == set(names)


def test_every_generated_token_is_accounted_for(run: Path) -> None:
    summary = checked(run)
    assert (summary["max_staleness"], summary["max_lag_seen"] > 0) == (2, True)
    assert summary["generated_tokens"] == summary["ledger"]["generated"]
    assert summary["trained_tokens"] == summary["ledger"]["trained"] > 0
    assert summary["ledger"]["evaluated"] > 0


def test_servers_and_learner_agree_on_the_log_probabilities(summary: dict) -> None:
    assert 0 <= summary["logprob_gap_mean"] <= 1e-4
    assert summary["logprob_gap_mean"] <= summary["logprob_gap_max"] <= 1e-3


def test_every_step_has_a_line_of_metrics(run: Path) -> None:
    rows = rows_of(run)
    steps = [row for row in rows if "step" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for name in (
        "loss",
        "reward_mean",
        "grad_norm",
        "entropy",
        "lag_max",
        "queued_tokens",
    ):
        assert all(math.isfinite(row[name]) for row in steps)
    assert all(row["ledger_difference"] == 0 for row in steps)
    evaluation_rows = [row for row in rows if "evaluation_step" in row]
    assert evaluation_rows[-1]["evaluation_step"] == STEPS
    assert all(
        row["num_episodes"] == 52 and row["num_failed"] == 0 for row in evaluation_rows
    )


def test_both_environments_are_trained_by_their_weights(
    run: Path, summary: dict
) -> None:
    by_step = [
        [trajectory.environment for trajectory in batch.trajectories]
        for batch in batches_of(run)
    ]
    trained = [name for names in by_step for name in names]
    assert len(trained) == STEPS * GROUPS * MEMBERS
    assert set(trained) == {"echo", "repeat"}
    # Either may load first: all groups are its own then, also those of the steps begun ahead.
    ahead = 1 + summary["max_staleness"]
    until_echo, until_repeat = (
        (sum(name not in names for names in by_step) + ahead) / STEPS
        for name in ("echo", "repeat")
    )
    share = trained.count("echo") / len(trained)
    assert 1 - max(0.3, until_echo) <= share <= max(0.8, until_repeat)


def test_sampled_trajectories_can_be_read(run: Path) -> None:
    lines = [
        json.loads(x) for x in (run / "trajectories.jsonl").read_text().splitlines()
    ]
    assert {line["step"] for line in lines} == {1, 6}
    assert {line["environment"] for line in lines} <= {"echo", "repeat"}
    for line in lines:
        assert line["prompt"]
        assert 0 <= line["reward"] <= 1
        assert sum(length for length, _ in line["versions"]) == line["sampled_tokens"]


def test_the_resolved_settings_are_kept(run: Path) -> None:
    config = load_config(run / "config.toml")
    assert config.run.steps == STEPS
    assert config.run_dir == run
    assert [environment.name for environment in config.environments] == [
        "echo",
        "repeat",
    ]
    assert (run / "config.toml").stat().st_mode & 0o077 == 0


def of_any_stack(stderr: str) -> str:
    """What a command wrote there, but for the warning of `make candidate`'s versions."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if "nobody has proved this stack" not in line)


def test_the_screen_shows_only_our_own_lines(
    result: subprocess.CompletedProcess[str], run: Path
):
    assert of_any_stack(result.stderr) == ""
    lines = result.stdout.splitlines()
    assert [line for line in lines if SHOWN.fullmatch(line) is None] == []
    steps = [line for line in lines if "  step " in line]
    # A quick step is left out; the first and the last one are not.
    assert 2 <= len(steps) <= STEPS
    assert f"step {STEPS}" in steps[-1]
    assert not [line for line in lines if " ! " in line or "!!" in line]
    assert f"{run}/" in lines[-1]


@pytest.mark.long
def test_the_exported_model_is_the_last_version(run: Path, summary: dict) -> None:
    import transformers

    folder = run / "checkpoints" / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**tokens, max_new_tokens=4, do_sample=False)
    assert reply.shape[1] > tokens["input_ids"].shape[1]
    (line,) = plain_loop(run / "config.toml", "--digest", folder)
    assert line["digest"] == summary["weight_digest"]


def test_a_finished_run_is_not_started_again(run: Path) -> None:
    again = run_command("run", "config.toml", cwd=run.parent)
    assert again.returncode == 2
    assert of_any_stack(again.stderr) == (
        f"slipstream: {run} is finished with {summary_of(run)['steps']} steps; "
        "raise run.steps to go on, or choose another run.name\n"
    )


def test_the_files_of_the_run_have_no_fault(run: Path) -> None:
    done = succeed("verify", run)
    assert done.stderr == ""
    assert re.search(
        rf": {STEPS} steps, .* at most [12] late; faults: 0$", done.stdout.strip()
    )


def test_the_run_has_written_its_page(run: Path) -> None:
    page_data = given_of(run / "page.html")
    (shown,) = page_data["runs"]
    assert (page_data["period_s"], shown["name"], shown["state"]) == (
        0,
        "run",
        "finished",
    )
    # A step whose groups are all of the other environment has no point.
    points = [
        (row["step"], row["echo/right"]) for row in rows_of(run) if "echo/right" in row
    ]
    assert shown["curves"]["echo/right"] == [
        [step, pytest.approx(v, rel=1e-4)] for step, v in points
    ]
    assert points
    assert shown["replies"]


@pytest.mark.long
def test_a_replay_elsewhere_reaches_every_recorded_digest_up_to_a_step(
    run: Path, tiny_model: Path, tmp_path: Path, summary: dict
) -> None:
    recorded = [r["digest"] for r in records_of(run, "step")]
    assert len(recorded) == STEPS
    assert recorded[-1] == summary["weight_digest"]
    shutil.copytree(
        run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "logs")
    )
    shutil.copytree(tiny_model, tmp_path / "copy")
    succeed("verify", "run", cwd=tmp_path)
    arguments = ["run", "--to", STEPS - 1, "model.path=copy"]
    replay = succeed("replay", *arguments, cwd=tmp_path)
    assert replay.stderr == ""
    assert [line.split() for line in replay.stdout.splitlines()] == [
        ["version", str(version), digest, "as", "recorded"]
        for version, digest in enumerate(recorded[:-1], start=1)
    ]
