"""/metrics of a whole run says what the run's status and its newest row say."""

import asyncio
import contextlib
import importlib.metadata
import json
import platform
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
import slipstream
from prometheus_client.parser import text_string_to_metric_families
from slipstream.core.machine.address import free_port
from slipstream.core.run_folder import TARGETS
from slipstream.extensions.prometheus.controller import SERVER_COUNTERS, STEP_METRICS
from slipstream.extensions.prometheus.endpoint import metrics_endpoint
from slipstream.learner.controller.records.ledger import FATES
from slipstream.protocol.access.security import open_channel
from slipstream.protocol.access.tokens import RUN_KEY
from slipstream.rollout_server.vllm.engine_requests import EngineRequests
from slipstream.v1 import status_pb2, status_pb2_grpc
from support.fakes.fake_server import FakeServer
from support.fakes.named_channel import OPEN
from support.rigs import tools
from support.rigs.completed import completed
from support.rigs.live_run import LiveRun
from support.rigs.run_processes import ROOT
from support.rigs.waiting import LIMIT_S, wait_until

DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "slipstream.json"
CHART = DEPLOY / "kubernetes" / "templates" / "rollout-server.yaml"
PROMTOOL = tools.program("promtool")
PROMETHEUS = tools.program("prometheus")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason=f"no promtool here: {tools.HOW}"
)

# The form of a name in that ecosystem: base units last, and `_total` behind counters.
UNITS = re.compile(r"_(ms|us|minutes|hours|kib|mib|gib|percent|tflops)(_|$)")


def scrape(run: LiveRun) -> tuple[str, dict[tuple[str, ...], float]]:
    """The text, and each sample by its name and the values of its labels but the run's."""
    path = run.config.run.dir / TARGETS / f"{run.config.run.name}@controller.json"
    (entry,) = json.loads(path.read_text())
    with urllib.request.urlopen(
        f"http://{entry['targets'][0]}/metrics", timeout=60
    ) as answer:
        text = answer.read().decode()
    return text, {
        (
            sample.name,
            *(v for k, v in sorted(sample.labels.items()) if k != "run"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# The run's two steps, the two that staleness allows and the one that is held, each of 4 groups of 4
# episodes of 5 tokens.
GENERATED_TOKENS = (2 + 2 + 1) * 4 * 4 * 5


class EngineCounts:
    """An engine's counts after a little of everything; it goes on with each scrape."""

    num_open = 3
    running = 2
    waiting = 1
    cache_usage = 0.25
    generated_tokens = 9
    prompt_tokens = 8
    found_tokens = 6
    preemptions = 5

    def __init__(self) -> None:
        self._scrapes = 0
        # The fake stands for the requests too.
        self.counter = self

    collect = EngineRequests.collect

    @property
    def looked_up_tokens(self) -> int:
        self._scrapes += 1
        return 10 * self._scrapes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    live = LiveRun(tmp_path_factory.mktemp("run"), tracking__prometheus="127.0.0.1:0")
    report = live.trainer.report

    async def report_all(step):
        """Adds the metrics that a longer run and a trainer have which computes something."""
        for name in STEP_METRICS:
            step.metrics.setdefault(name, 0.5)
        return await report(step)

    live.trainer.report = report_all
    with live:
        yield live


def status_of(run: LiveRun) -> status_pb2.RunStatus:
    return run.do(
        lambda channel: status_pb2_grpc.StatusServiceStub(channel).GetStatus(
            status_pb2.GetStatusRequest(), timeout=60
        )
    )


def test_the_numbers_are_those_of_the_status_and_the_newest_row(run):
    def is_settled() -> bool:
        """The trainer holds before step 2, and every group that may be leased is complete."""
        status = status_of(run)
        (server,) = status.servers
        # Version 2 is served, and heartbeats have said all that they will.
        is_served = server.version.step == 2
        is_told = (
            status.ledger.generated == GENERATED_TOKENS and not status.ledger.in_flight
        )
        return is_served and is_told and status.leased_groups == status.complete_groups

    wait_until(is_settled)
    status, (_, samples) = status_of(run), scrape(run)
    assert samples["slipstream_steps_total",] == status.step == 2
    assert samples["slipstream_run_state", "running"] == 1
    assert samples["slipstream_run_state", "failed"] == 0
    assert samples["slipstream_generated_tokens_total",] == status.ledger.generated > 0
    fates = {fate: samples["slipstream_ledger_tokens", fate] for fate in FATES}
    assert fates == {fate: getattr(status.ledger, fate) for fate in FATES}
    assert sum(fates.values()) == status.ledger.generated
    assert samples["slipstream_servers", "serving"] == 1
    (server,) = status.servers
    disabled = (
        "slipstream_server_disabled_feature",
        "no drafts here",
        "drafts",
        server.server_id,
    )
    assert samples[disabled] == 1
    assert dict(server.disabled_features) == {"drafts": "no drafts here"}
    for field, (name, _) in SERVER_COUNTERS.items():
        got = samples[f"slipstream_server_{name}_total", server.server_id]
        assert got == pytest.approx(getattr(server.report, field))
    assert samples["slipstream_step_lag_mean_versions",] == status.metrics["lag_mean"]
    assert (
        samples["slipstream_environment_reward_mean", "e"] == status.metrics["e/reward"]
    )
    usage = shutil.disk_usage(run.config.run_dir)
    wait_until(lambda: ("slipstream_disk_size_bytes",) in scrape(run)[1])
    assert scrape(run)[1]["slipstream_disk_size_bytes",] == usage.total


def test_versions_of_each_process_are_labels_of_a_metric(run):
    (info,) = (
        f for f in text_string_to_metric_families(scrape(run)[0]) if "build" in f.name
    )
    (sample,) = info.samples
    assert (sample.name, sample.value) == ("slipstream_build_info", 1.0)
    assert sample.labels["version"] == slipstream.__version__
    assert sample.labels["torch"] == importlib.metadata.version("torch")
    assert sample.labels["python"] == platform.python_version()


def test_every_metric_has_a_meaning_a_base_unit_and_only_few_labels(run):
    text, _ = scrape(run)
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert not UNITS.search(family.name), family.name
        for sample in family.samples:
            if sample.name == "slipstream_build_info":
                continue
            labels = sample.labels.keys() - {
                "run",
                "server",
                "environment",
                "state",
                "fate",
                "cause",
                "feature",
                "setting",
            }
            assert not labels
            assert sample.name.endswith("_total") == (family.type == "counter")


@needs_promtool
def test_promtool_finds_nothing_to_say(run):
    text, _ = scrape(run)
    done = completed([str(PROMTOOL), "check", "metrics"], input=text)
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


def test_the_controller_of_a_failed_run_waits_for_the_scrape_that_sees_it(tmp_path):
    async def fail(channel) -> None:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        request = status_pb2.StopRunRequest(reason="a test", failed=True)
        await stub.StopRun(request, timeout=LIMIT_S)

    with LiveRun(tmp_path, tracking__prometheus="127.0.0.1:0") as run:
        _, before = scrape(run)
        assert before["slipstream_run_state", "failed"] == 0
        run.do(fail)
        wait_until((run.config.run_dir / "summary.json").exists)
        _, after = scrape(run)
        assert after["slipstream_run_state", "failed"] == 1
        wait_until(lambda: run.is_over)


async def call_another_run(address: str) -> None:
    async with open_channel(address, OPEN) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        metadata = ((RUN_KEY, "other-1"),)
        request = status_pb2.GetStatusRequest()
        with pytest.raises(grpc.aio.AioRpcError, match="another run"):
            await stub.GetStatus(request, metadata=metadata, timeout=LIMIT_S)


def test_refused_calls_are_counted(tmp_path):
    with LiveRun(tmp_path, tracking__prometheus="127.0.0.1:0") as run:
        _, before = scrape(run)
        run.do(lambda _: call_another_run(run.address))
        _, after = scrape(run)
    assert before["slipstream_refused_calls_total",] == 0
    assert after["slipstream_refused_calls_total",] == 1


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_alerts_dashboard_and_chart_ask_for_metrics_that_are_there(run):
    text, samples = scrape(run)
    # A family without a sample, such as that of an evaluation, is known too.
    metric_names = {name for name, *_ in samples} | set(
        re.findall(r"# TYPE (\w+)", text)
    )
    engine = EngineCounts()
    metric_names |= {
        sample.name for family in engine.collect() for sample in family.samples
    }
    # A job's name is a value, no metric.
    text = re.sub(
        r'job="\w+"', "", ALERTS.read_text() + "".join(queries()) + CHART.read_text()
    )
    matches = set(re.findall(r"\b(?:slipstream|process)_\w+", text))
    assert len(matches) > 40
    assert matches <= metric_names


@needs_promtool
def test_each_alert_fires_when_it_must_and_at_no_other_time():
    tests = ALERTS.with_name("alerts.test.yml")
    done = completed([str(PROMTOOL), "test", "rules", tests])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("waited_s", "idle", "servers"),
    [
        (0.0, 0.0, 4),
        (1.0, 0.0, 6),
        (0.0, 0.25, 3),
        (0.5, 0.25, 4),
    ],
)
def test_the_chart_asks_for_servers_by_measured_waits(
    tmp_path, waited_s, idle, servers
):
    """Steps take 2 s, and 4 of 5 servers serve."""
    (query,) = re.findall(
        r"query: >-\n(.*?)\n +threshold", CHART.read_text(), re.DOTALL
    )
    series = {
        'servers{run="r", state="serving"}': 4,
        'servers{run="r", state="loading"}': 1,
        'step_groups_wait_seconds{run="r"}': waited_s,
        'step_duration_seconds{run="r"}': 2.0,
        'step_servers_idle_ratio{run="r"}': idle,
        # The port of a different run.
        'step_servers_idle_ratio{run="other"}': 1.0,
    }
    case = {
        "interval": "30s",
        "input_series": [
            {"series": f"slipstream_{name}", "values": f"{value}x20"}
            for name, value in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": query.replace("{{ $run }}", "r"),
                "eval_time": "10m",
                "exp_samples": [{"labels": "{}", "value": servers}],
            }
        ],
    }
    (tmp_path / "tests.yml").write_text(json.dumps({"tests": [case]}))
    done = completed([str(PROMTOOL), "test", "rules", tmp_path / "tests.yml"])
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def prometheus(folder: Path, targets: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes each second."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    config = folder / "prometheus.yml"
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s")
    text = text.replace("runs/.prometheus", str(targets)).replace(
        "alerts.yml", str(ALERTS)
    )
    config.write_text(text)
    command = [
        str(PROMETHEUS),
        f"--config.file={config}",
        f"--web.listen-address={address}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log
        )
    try:
        yield f"http://{address}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def asked(server: str, query: str) -> list[dict]:
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        assert text == "Service Unavailable", f"{query}: {text}"
    except urllib.error.URLError:
        # Prometheus does not listen yet.
        pass
    return []


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason=f"no prometheus here: {tools.HOW}")
def test_the_real_prometheus_has_data_for_every_query_of_the_dashboard(run, tmp_path):
    async def serve() -> None:
        async with metrics_endpoint(
            run.config, "rollout_server", [EngineCounts()], server="fake"
        ):
            await asyncio.Event().wait()

    process = run.start(serve())
    try:
        # Prometheus may start before there is a run.
        with prometheus(tmp_path, targets := tmp_path / "runs" / TARGETS) as server:
            wait_until(lambda: asked(server, "vector(1)"))
            targets.parent.mkdir()
            targets.symlink_to(run.config.run.dir / TARGETS)
            wait_until(lambda: len(asked(server, "up == 1")) == 2)
            jobs = {sample["metric"]["job"] for sample in asked(server, "up")}
            assert jobs == {f"slipstream_{r}" for r in ("controller", "rollout_server")}
            for query in queries():
                asks = partial(asked, server, query.replace("$run", "r"))
                # A rate needs two scrapes.
                wait_until(asks, 30)
            assert asked(server, 'ALERTS{alertstate="firing"}') == []
    finally:
        process.cancel()
