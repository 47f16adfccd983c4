"""Each fault of a run raises its alert, and a quiet run none.

tests/data/quiet_run.json has what a real Prometheus scraped from the first 19 minutes of a real
run: the series that alerts ask for, a value each half minute, `VALUE*COUNT` for equal ones and `_`
where there was none. Spread and number of held-out rewards are from that run's metrics.jsonl.

Alerts that wait for longer need more: the run's last minutes are repeated behind it. A fault is
planted where they begin, and promtool says which alerts fire.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
from support.rigs import tools
from support.rigs.completed import completed
from support.rigs.run_processes import ROOT

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
RECORDED = ROOT / "tests" / "data" / "quiet_run.json"
INTERVAL_S = 30
# The last samples of the recording, of even steps and rewards, and how often they are repeated.
NUM_REPEATED = 9
REPEATS = 7
# Series that go on from where they are when the samples are repeated, by the end of their name.
GROWING = ("_total", "_last_step_timestamp_seconds", "_checkpointed_steps")
# Alerts on speed, which may be true of the quiet run: its environment is slow.
ADVICE = {"TrainerStarved", "ServersStarved", "LagAtTheBound"}
# The alerts that have fired so many seconds ago or later.
FIRED = 'max by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{}s]))'

# The samples of each series, one each half minute.
Recording: TypeAlias = dict[str, list[str]]

PROMTOOL = tools.program("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason=f"no promtool here: {tools.HOW}"
)


def recorded() -> Recording:
    recording: Recording = {}
    for series, text in json.loads(RECORDED.read_text()).items():
        samples: list[str] = []
        for entry in text.split():
            value, _, count = entry.partition("*")
            samples += [value] * int(count or 1)
        recording[series] = samples
    return recording


def growth(recording: Recording, series: str) -> float:
    """By how much the series grows while the repeated samples pass."""
    if not series.partition("{")[0].endswith(GROWING):
        return 0.0
    # Checkpoints keep their distance from the steps.
    samples = recording[series.replace("_checkpointed_steps", "_steps_total")]
    return float(samples[-1]) - float(samples[-1 - NUM_REPEATED])


def quiet_run() -> Recording:
    """The recording, and behind it its last samples again and again."""
    recording = recorded()
    run: Recording = {}
    for series, samples in recording.items():
        by = growth(recording, series)
        run[series] = list(samples)
        for repeat in range(1, REPEATS + 1):
            run[series] += [
                value if value == "_" else str(float(value) + repeat * by)
                for value in samples[-NUM_REPEATED:]
            ]
    return run


def num_samples(recording: Recording) -> int:
    return max(map(len, recording.values()))


def planted_at() -> int:
    """The sample from which on a fault is there: the first behind the recording."""
    return num_samples(recorded())


def alerts_of(recording: Recording, folder: Path) -> set[str]:
    """The names of all alerts that fire at any time of the recording, by promtool."""
    end_s = num_samples(recording) * INTERVAL_S
    case = {
        "interval": f"{INTERVAL_S}s",
        "input_series": [
            {"series": series, "values": " ".join(samples)}
            for series, samples in recording.items()
        ],
        "promql_expr_test": [
            {
                "expr": FIRED.format(end_s),
                "eval_time": f"{end_s}s",
                "exp_samples": [],
            }
        ],
    }
    tests = folder / "tests.yml"
    tests.write_text(
        json.dumps(
            {
                "rule_files": [str(ALERTS)],
                "evaluation_interval": f"{INTERVAL_S}s",
                "tests": [case],
            }
        )
    )
    done = completed([str(PROMTOOL), "test", "rules", tests])
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in output, output
    return set(re.findall(r'alertname="Slipstream(\w+)"', output.partition("got:")[2]))


Change: TypeAlias = Callable[[list[str], int], list[str]]


def constant(value: float) -> Change:
    """From the fault on there is this value."""
    return lambda samples, at: samples[:at] + [str(value)] * (len(samples) - at)


def frozen(samples: list[str], at: int) -> list[str]:
    """From the fault on the value stays."""
    return samples[:at] + [samples[at]] * (len(samples) - at)


def gone(samples: list[str], at: int) -> list[str]:
    """From the fault on there is nothing to scrape."""
    return samples[:at] + ["stale"] + ["_"] * (len(samples) - at - 1)


def times(factor: float) -> Change:
    def changed(samples: list[str], at: int) -> list[str]:
        after = [
            value if value == "_" else str(factor * float(value))
            for value in samples[at:]
        ]
        return samples[:at] + after

    return changed


def growing(by: float) -> Change:
    """From the fault on a counter grows by so much between two scrapes."""

    def changed(samples: list[str], at: int) -> list[str]:
        after = [
            str(float(samples[at]) + by * number) for number in range(len(samples) - at)
        ]
        return samples[:at] + after

    return changed


def missed(samples: list[str], at: int) -> list[str]:
    """One scrape finds nothing."""
    return samples[:at] + ["_"] + samples[at + 1 :]


def last_word(value: float) -> Change:
    """One more scrape says this, and then there is nothing to scrape."""
    return lambda samples, at: (
        samples[:at] + [str(value), "stale"] + ["_"] * (len(samples) - at - 2)
    )


CONTROLLER = 'job="slipstream_controller"'
NO_STEPS = {
    "slipstream_steps_total": frozen,
    "slipstream_last_step_timestamp_seconds": frozen,
    "slipstream_server_busy_seconds_total": frozen,
}
# Of each fault: what becomes of the series with these names or labels, and the alerts it raises.
FAULTS: dict[str, tuple[Mapping[str, Change], set[str]]] = {
    "nothing": ({}, set()),
    "the trainer stands still": (NO_STEPS, {"NoStep", "ServersStarved"}),
    "the run fails, and one scrape sees it": (
        {
            CONTROLLER: gone,
            'state="failed"': last_word(1),
            'state="running"': last_word(0),
        },
        {"RunFailed"},
    ),
    "the run is stopped in order": (
        {
            CONTROLLER: gone,
            'state="running"': last_word(0),
            'state="stopping"': last_word(1),
        },
        set(),
    ),
    "a scrape is missed": ({CONTROLLER: missed}, set()),
    "the controller hangs": (
        {CONTROLLER: gone, "up{": constant(0)},
        {"ControllerDown"},
    ),
    "the host is gone": ({CONTROLLER: gone}, {"RunVanished"}),
    "the only server is gone": (
        {**NO_STEPS, "slipstream_servers{": constant(0), "slipstream_server_": gone},
        {"NoServers", "NoStep"},
    ),
    "a server is lost again and again": (
        {"slipstream_servers_lost_total": growing(0.25)},
        {"ServerFlaps"},
    ),
    "an environment is suspended": (
        {"slipstream_environment_suspended": constant(1)},
        {"EnvironmentSuspended"},
    ),
    "a third of all episodes fails": (
        {
            "slipstream_environment_episodes_total": growing(300),
            "slipstream_environment_failed_episodes_total": growing(100),
        },
        {"EpisodesFail"},
    ),
    "the loss is NaN": (
        {"slipstream_step_loss": constant(float("nan"))},
        {"NotFinite"},
    ),
    "a batch is set aside": (
        {"slipstream_set_aside_batches_total": constant(1)},
        {"BatchSetAside"},
    ),
    "the gradient is a thousand times as large": (
        {"slipstream_step_gradient_norm": times(1000)},
        {"GradientJumps"},
    ),
    "the reward falls to 0": (
        {
            "slipstream_step_reward_mean": constant(0),
            "slipstream_step_reward_std": constant(0),
        },
        {"RewardFell"},
    ),
    "the held-out reward falls": (
        {"slipstream_evaluation_reward_mean": times(0.1)},
        {"HeldOutFell"},
    ),
    "checkpoints are not written any more": (
        {
            "slipstream_steps_total": growing(5),
            "slipstream_checkpointed_steps": frozen,
        },
        {"NoCheckpoint"},
    ),
    "the queue is full": ({'cause="queue"': growing(25)}, {"QueueFull"}),
    "memory is nearly full": (
        {"slipstream_memory_free_bytes": constant(1e8)},
        {"MemoryNearlyFull"},
    ),
    "the disk is nearly full": (
        {"slipstream_disk_free_bytes": constant(1e8)},
        {"DiskNearlyFull"},
    ),
    "a certificate ends in two weeks": (
        {'setting="security.tls_certificate"': constant(14 * 86400)},
        {"CertificateEnds"},
    ),
    "callers are refused": (
        {"slipstream_refused_calls_total": growing(1)},
        {"CallsRefused"},
    ),
    "learner and servers disagree": (
        {"slipstream_step_logprob_gap_mean_nats": constant(0.4)},
        {"LogprobGap"},
    ),
    "the ledger is open": ({"slipstream_ledger_gaps": constant(1)}, {"LedgerOpen"}),
    "the lag stays at its bound": (
        {"slipstream_step_lag_mean_versions": constant(2)},
        {"LagAtTheBound"},
    ),
    "the trainer waits for groups": (
        {
            "slipstream_step_waiting_seconds": constant(9),
            "slipstream_step_duration_seconds": constant(10),
        },
        {"TrainerStarved"},
    ),
}


@needs_promtool
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_its_alerts_and_no_other(fault, tmp_path):
    changes, expected = FAULTS[fault]
    recording = quiet_run()
    at = planted_at()
    for part, change in changes.items():
        changed = [series for series in recording if part in series]
        assert changed, part
        for series in changed:
            recording[series] = change(quiet_run()[series], at)
    fired = alerts_of(recording, tmp_path)
    assert fired - ADVICE == expected - ADVICE
    assert expected <= fired


def test_the_chart_has_the_same_alerts():
    """A copy, since a link would lead nowhere in a chart that somebody copies."""
    chart = ROOT / "deploy" / "kubernetes" / "alerts.yml"
    assert not chart.is_symlink()
    assert chart.read_text() == ALERTS.read_text()


def test_each_alert_has_a_fault_that_raises_it():
    raised = {f"Slipstream{name}" for _, names in FAULTS.values() for name in names}
    assert raised == set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
