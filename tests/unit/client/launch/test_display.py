"""What a run shows on the screen at its end."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
from slipstream.client.launch import display as display_module
from slipstream.client.launch.display import Display, loading_line
from slipstream.core.settings.config import Config
from slipstream.v1 import status_pb2
from support.fakes.small_configs import config_of

ERROR = status_pb2.SEVERITY_ERROR
SUMMARY = {
    "state": "finished",
    "steps": 3,
    "reward_first": 0.5,
    "reward_last": 0.75,
    "reward_steps": 5,
    "reward_heldout": None,
    "reward_heldout_first": None,
    "reward_heldout_first_step": None,
    "reward_heldout_step": None,
    "suspended_environments": {},
    "max_lag_seen": 1,
    "max_staleness": 2,
    "trajectories_with_several_versions": 1234,
    "ledger": dict.fromkeys(
        (
            "generated",
            "trained",
            "filtered",
            "failed",
            "cancelled",
            "quarantined",
            "evaluated",
            "set_aside",
            "queued",
            "in_flight",
            "lost",
            "difference",
        ),
        0,
    ),
    "publishes": 3,
    "publishes_verified": 1,
    "logprob_gap_mean": None,
    "logprob_gap_max": None,
    "time": {
        "trainer": {"training": 0.7, "publish": 0.001},
        "servers": {"sampling": 0.5},
    },
    "wall_s": 12.0,
}


def shown(config: Config, **changes: object) -> tuple[bool, str]:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "summary.json").write_text(json.dumps(SUMMARY | changes))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        is_stopped = Display(config).summary()
    return is_stopped, out.getvalue()


def test_a_run_that_is_done_says_nothing_of_going_on(tmp_path: Path) -> None:
    is_stopped, text = shown(config_of(tmp_path), steps=10)
    assert not is_stopped
    assert "goes on" not in text
    assert "0.500 in the first 5 steps, 0.750 in the last 5 steps" in text
    _, text = shown(config_of(tmp_path), reward_steps=1)
    assert "0.500 in the first step, 0.750 in the last step" in text
    assert "new weights          came in the middle of 1,234 trajectories" in text
    assert "log-probability gap" not in text
    _, text = shown(config_of(tmp_path), logprob_gap_mean=2e-7, logprob_gap_max=1e-6)
    assert "log-probability gap  2.0e-07 mean, 1.0e-06 largest" in text


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_a_run_that_ends_early_says_how_it_goes_on(state, tmp_path, monkeypatch):
    # A shell that finds the program by its name is told that name.
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(
        sys, "argv", [".venv/bin/slipstream", "run", "a.toml", "run.steps=10"]
    )
    how = "resume it with: .venv/bin/slipstream run a.toml run.steps=10"
    # A run that has failed would fail again as it is.
    how = f"mend the cause, then {how}" if state == "failed" else how
    is_stopped, text = shown(config_of(tmp_path), state=state)
    assert is_stopped == (state == "stopped")
    assert text.endswith(f"\n  {state} at version 3 of 10; {how}\n")
    # Before the first step there is nothing for a table.
    _, text = shown(config_of(tmp_path), state=state, steps=0)
    assert text == f"\n  {state} at version 0 of 10; {how}\n"


def test_a_run_whose_summary_could_not_be_written_says_how_it_goes_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["/missing/slipstream", "run", "a.toml"])
    config = config_of(tmp_path)
    assert not Display(config).summary()
    how = "mend the cause, then resume it with: /missing/slipstream run a.toml"
    assert capsys.readouterr().out == f"\n  {config.run_dir} has no summary; {how}\n"


def test_a_run_that_may_not_go_on_does_not_say_so(tmp_path: Path) -> None:
    _, text = shown(config_of(tmp_path, resume="never"), state="stopped")
    assert text.endswith("\n  stopped at version 3 of 10\n")


HELD_OUT = {"reward_heldout_first": 0.25, "reward_heldout_first_step": 0}
LEDGER = dict.fromkeys(SUMMARY["ledger"], 0)
LEDGER |= {"generated": 10, "trained": 5, "queued": 3, "in_flight": 2}
ROWS: list[tuple[dict[str, object], str]] = [
    ({}, "time of the trainer  training 70%\n"),
    ({}, "time of the servers  sampling 50%\n"),
    # A client's own loop has no groups.
    (
        {
            "reward_first": None,
            "time": {"trainer": {"waiting for groups": 0.7}, "servers": {}},
        },
        "time of the trainer  waiting for the client 70%\n",
    ),
    ({}, "publishes            3 since the last start, 1 probe compared\n"),
    (
        {"suspended_environments": {"a": "KeyError", "b": "x"}},
        "suspended            a: KeyError\n  suspended            b: x\n",
    ),
    # A single round of evaluation is no progress.
    (
        HELD_OUT | {"reward_heldout": 0.25, "reward_heldout_step": 0},
        "reward held out      0.250 at version 0\n",
    ),
    (
        HELD_OUT | {"reward_heldout": 0.375, "reward_heldout_step": 10},
        "reward held out      0.250 at version 0, 0.375 at version 10\n",
    ),
    ({"ledger": LEDGER}, "10 = trained 5, queued 3, in flight 2; difference 0"),
]


@pytest.mark.parametrize(("changes", "row"), ROWS)
def test_the_table_has_rows_of_what_there_is(changes, row, tmp_path: Path) -> None:
    assert row in shown(config_of(tmp_path), **changes)[1]


def test_a_run_says_what_it_loads_and_where_servers_of_other_commands_join(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    begin = "loading model into 1 trainer rank"
    assert (
        loading_line(config, 2) == f"{begin} and 2 rollout servers; that takes a while"
    )
    assert loading_line(config, 0) == f"{begin}; rollout servers join at 127.0.0.1:0"


def test_a_cause_of_failure_is_shown_once_and_at_once(tmp_path: Path, capsys) -> None:
    display = Display(config_of(tmp_path))
    display.show(
        status_pb2.Event(number=1, text="the run failed: no server", severity=ERROR)
    )
    assert capsys.readouterr() == ("", "slipstream: no server\n")
    display.show(
        status_pb2.Event(
            number=2, text="no server", final_state=status_pb2.RUN_STATE_FAILED
        )
    )
    assert display.failure == display.told_failure == "no server"
    assert capsys.readouterr() == ("", "")


def test_the_line_of_a_step_fits_a_terminal(tmp_path: Path, capsys) -> None:
    metrics = {"reward_mean": -0.5, "lag_mean": 1.25, "lag_max": 2.0, "step_s": 12.25}
    event = status_pb2.Event(
        number=1, step=100, metrics=metrics | {"generated_tokens_per_s": 95_426.0}
    )
    Display(config_of(tmp_path, steps=1000)).show(event)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "step  100/1000  reward -0.500  lag 1.2, max 2  95,426 tok/s  12.25 s"
    )
    assert len(line) <= 79
    # The rewards of demonstrations are all 1.
    event.metrics.update({"effective_sample_size": 0.0, "loss": 1.25})
    Display(config_of(tmp_path, steps=1000)).show(event)
    assert "step  100/1000  loss    1.250  lag 1.2" in capsys.readouterr().out


def test_fast_steps_are_shown_now_and_then_and_the_last_one_always(
    tmp_path: Path, monkeypatch, capsys
):
    names = ("reward_mean", "lag_mean", "lag_max", "generated_tokens_per_s", "step_s")
    events = [
        status_pb2.Event(number=step, step=step, metrics=dict.fromkeys(names, 0.0))
        for step in (1, 2, 3)
    ]
    config = config_of(tmp_path, steps=3)
    for every_s, shown_steps in ((60.0, [1, 3]), (0.0, [1, 2, 3])):
        monkeypatch.setattr(display_module, "STEP_EVERY_S", every_s)
        display = Display(config)
        for event in events:
            display.show(event)
        matches = re.findall(r"step (\d)/3", capsys.readouterr().out)
        assert matches == [str(step) for step in shown_steps]
