"""/metrics of a whole run says what the run's status and its newest row say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from slipstream.core.run_folder import TARGETS
from slipstream.learner.controller.reporting.run_collector import FATES, SERVER_COUNTERS
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.fake_server import FakeServer
from support.rigs.live_run import LiveRun
from support.rigs.waiting import wait_until

# The form of a name in that ecosystem: base units last, and `_total` behind counters.
UNITS = re.compile(r"_(ms|us|minutes|hours|kib|mib|gib|percent|tflops)(_|$)")


def scrape(run: LiveRun) -> tuple[str, dict[tuple[str, ...], float]]:
    """The text, and each sample by its name and the values of its labels but the run's."""
    path = run.config.run.dir / TARGETS / f"{run.config.run.name}@controller.json"
    (entry,) = json.loads(path.read_text())
    with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return text, {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with LiveRun(tmp_path_factory.mktemp("run"), tracking__prometheus="127.0.0.1:0") as live:
        yield live


def status_of(run: LiveRun) -> status_pb2.RunStatus:
    return run.do(
        lambda channel: status_pb2_grpc.StatusServiceStub(channel).GetStatus(
            status_pb2.GetStatusRequest(), timeout=60
        )
    )


def test_the_numbers_are_those_of_the_status_and_the_newest_row(run):
    def is_settled() -> bool:
        """The trainer holds before its next step, and no lease is possible or runs."""
        status = status_of(run)
        ended = status.ledger.generated and not status.ledger.in_flight
        return bool(ended and status.leased_groups == status.complete_groups > 0)

    wait_until(is_settled)
    status, (_, found) = status_of(run), scrape(run)
    assert found["slipstream_steps_total",] == status.step == 2
    assert found["slipstream_run_state", "running"] == 1
    assert found["slipstream_run_state", "failed"] == 0
    assert found["slipstream_generated_tokens_total",] == status.ledger.generated > 0
    fates = {fate: found["slipstream_ledger_tokens", fate] for fate in FATES}
    assert fates == {fate: getattr(status.ledger, fate) for fate in FATES}
    assert sum(fates.values()) == status.ledger.generated
    assert found["slipstream_servers", "serving"] == 1
    (server,) = status.servers
    for field, (name, _) in SERVER_COUNTERS.items():
        got = found[f"slipstream_server_{name}_total", server.server_id]
        assert got == pytest.approx(getattr(server.report, field))
    assert found["slipstream_step_lag_mean_versions",] == status.metrics["lag_mean"]
    assert found["slipstream_environment_reward_mean", "e"] == status.metrics["e/reward"]
    usage = shutil.disk_usage(run.config.run_dir)
    wait_until(lambda: ("slipstream_disk_size_bytes",) in scrape(run)[1])
    assert scrape(run)[1]["slipstream_disk_size_bytes",] == usage.total


def test_every_metric_has_a_meaning_a_base_unit_and_only_few_labels(run):
    text, _ = scrape(run)
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert not UNITS.search(family.name), family.name
        for sample in family.samples:
            others = sample.labels.keys() - {"run", "server", "environment", "state", "fate"}
            assert not others
            assert sample.name.endswith("_total") == (family.type == "counter")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")
def test_promtool_finds_nothing_to_say(run):
    text, _ = scrape(run)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_lost_server_is_counted_and_leaves_no_series(tmp_path):
    with LiveRun(tmp_path, tracking__prometheus="127.0.0.1:0") as run:
        second = FakeServer(run.address, "second")
        running = run.start(second.run())
        wait_until(lambda: ("slipstream_server_version", "second") in scrape(run)[1])
        assert scrape(run)[1]["slipstream_servers_lost_total",] == 0
        running.cancel()
        wait_until(lambda: scrape(run)[1]["slipstream_servers_lost_total",] == 1)
        assert ("slipstream_server_version", "second") not in scrape(run)[1]
    folder = run.config.run.dir / TARGETS
    assert not list(folder.iterdir())
