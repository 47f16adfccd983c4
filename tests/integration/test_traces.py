"""A collector of OpenTelemetry gets the way of every group, over both processes."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from slipstream.client.launch.preflight import free_port
from slipstream.core.errors import ConfigError
from slipstream.core.types import Failure, FailureKind, Purpose, Status
from slipstream.extensions.traces import exporter as traces_module
from slipstream.extensions.traces.exporter import Traces
from slipstream.extensions.traces.server import ServerTraces
from slipstream.rollout_server.episodes.lease import EpisodeTask
from slipstream.rollout_server.episodes.play import Spans
from slipstream.v1 import fleet_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.fake_trajectories import make_trajectory
from support.fakes.small_configs import small_config
from support.fakes.trace_collector import TraceCollector, attributes_of
from support.rigs.completed import python
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import LIMIT_S


class TracedServer(FakeServer):
    """A fake server that sends the spans that a real one would."""

    def __init__(self, address: str, traces: Spans) -> None:
        super().__init__(address)
        self.spoil = self.traced
        self._traces = traces

    def traced(self, trajectory):
        lease = next(each for each in self.leases if each.group_id == trajectory.group_id)
        task = EpisodeTask(None, LeaseOf(lease), trajectory.member, trajectory.attempt)
        self._traces.call(task, 1, begin_s=0.0, num_tokens=5)
        self._traces.episode(trajectory, begin_s=0.0)
        self._traces.delivery(trajectory, begin_s=0.0)
        return trajectory


class LeaseOf:
    purpose = Purpose.TRAINING

    def __init__(self, lease: fleet_pb2.Lease) -> None:
        self.group_id = lease.group_id


def tree(spans: list[Span]) -> dict[str, set[str]]:
    """The names of the children of each name in a trace."""
    names = {span.span_id: span.name.split()[0] for span in spans}
    children: dict[str, set[str]] = {}
    for span in spans:
        parent = names[span.parent_span_id] if span.parent_span_id else ""
        children.setdefault(parent, set()).add(names[span.span_id])
    return children


async def test_a_trace_of_each_group_joins_what_controller_and_server_say(tmp_path):
    with TraceCollector() as collector:
        config = make_config(tmp_path, run__steps=4, tracking__traces_url=collector.url)
        address = config.controller.address
        server = TracedServer(address, Spans())

        async def during(controller, tasks) -> None:
            """The server gets the run's id, as its welcome says it."""
            run_id = controller._progress.run_id
            server._traces = ServerTraces(Traces(collector.url, run_id, "rollout_server", "fake"))

        trainer = FakeTrainer(address)
        summary = await play(config, server, trainer=trainer, during=during)
        await server._traces._traces.aclose()
        assert summary["state"] == "finished"
    by_name = Counter(span.name.split()[0] for span in collector.spans)
    assert by_name["group"] == 16
    groups = [t for t in collector.traces().values() if any("group" in s.name for s in t)]
    assert len(groups) == 16
    for spans in groups:
        children = tree(spans)
        assert children[""] == {"group"}
        assert children["group"] == {"lease", "batch", "step", "episode"}
        assert children["episode"] == {"call", "delivery", "arrival"}
        assert Counter(s.name for s in spans)["episode"] == 4
        (root,) = (span for span in spans if not span.parent_span_id)
        assert attributes_of(root)["slipstream.environment"] == "e"
        for span in spans:
            assert span.end_time_unix_nano >= span.start_time_unix_nano
            origin = collector.services[span.span_id]
            is_servers = span.name in ("episode", "call", "delivery")
            assert origin == (
                "slipstream_rollout_server" if is_servers else "slipstream_controller"
            )
    roots = {s.trace_id: s for s in collector.spans if s.name == "step" and not s.parent_span_id}
    assert len(roots) == 4
    linked = [link.trace_id for step in roots.values() for link in step.links]
    assert sorted(linked) == sorted(spans[0].trace_id for spans in groups)
    assert {link.trace_id for t in groups for s in t if s.name == "step" for link in s.links} == {
        *roots
    }
    assert by_name["publish"] >= 2


async def test_a_collector_that_is_not_there_costs_the_run_nothing(tmp_path, caplog):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}/v1/traces"
    config = make_config(tmp_path, run__steps=3, tracking__traces_url=url)
    summary = await play(config)
    assert summary["state"] == "finished"
    assert "Failed to export" in caplog.text or "Connection refused" in caplog.text


async def test_a_collector_that_hangs_holds_no_end_for_long(monkeypatch, caplog):
    # It would hold it as long as one export may take, for each part of what is left.
    monkeypatch.setattr(traces_module, "CLOSE_LIMIT_S", 0.1)
    is_asked, may_end = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        is_asked.set()
        await may_end.wait()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as collector:
        port = collector.sockets[0].getsockname()[1]
        sdk = Traces(f"http://127.0.0.1:{port}/v1/traces", "run-1", "rollout_server", "one")
        for number in range(3):
            sdk.span("step/1", "step", str(number), begin_s=0.0)
        await sdk.aclose()
        # The collector has not answered, and the end is there.
        assert not may_end.is_set()
        async with asyncio.timeout(LIMIT_S):
            await is_asked.wait()
        may_end.set()
    assert "did not take the last spans" in caplog.text


async def test_a_publish_and_a_failure_show_on_the_server_too(small_trajectory):
    with TraceCollector() as collector:
        sdk = Traces(collector.url, "run-1", "rollout_server", "one")
        traces = ServerTraces(sdk, "one")
        stages = fleet_pb2.PublishStages(prepare_s=2.0, load_s=0.25)
        serving, loaded = fleet_pb2.PUBLISH_PHASE_SERVING, fleet_pb2.PUBLISH_PHASE_LOADED
        for phase in (loaded, serving):
            traces.publish(
                fleet_pb2.PublishReport(publish_id="p1", phase=phase, paused_s=0.5, stages=stages)
            )
        failure = Failure(FailureKind.ENVIRONMENT, "it broke")
        traces.episode(replace(small_trajectory, status=Status.FAILED, failure=failure), begin_s=1)
        traces.episode(replace(small_trajectory, purpose=Purpose.EVALUATION), begin_s=1)
        await sdk.aclose()
    load, pause, episode = collector.spans
    assert (load.name, pause.name, episode.name) == ("load", "pause", "episode")
    assert pause.parent_span_id == load.span_id
    assert load.end_time_unix_nano - load.start_time_unix_nano == pytest.approx(2.5e9, rel=1e-3)
    assert pause.end_time_unix_nano - pause.start_time_unix_nano == pytest.approx(5e8, rel=1e-3)
    assert attributes_of(load)["slipstream.load_s"] == 0.25
    assert (episode.status.message, episode.status.code) == ("it broke", 2)


@pytest.fixture
def small_trajectory():
    return make_trajectory(3, 4)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://127.0.0.1/v1", "must be http"),
        ("http://tempo.example:4318/v1/traces", "must be https, tempo.example is not loopback"),
        ("https://user:secret@tempo.example/v1/traces", "without a user"),
    ],
)
def test_a_url_that_is_no_safe_collector_is_refused(url, words):
    with pytest.raises(ConfigError, match=words) as refused:
        small_config(tracking={"traces_url": url})
    assert "secret" not in str(refused.value)


def test_the_controller_imports_neither_library_unless_asked_to():
    program = (
        "import slipstream.learner.controller.application, sys; "
        "print({m.split('.')[0] for m in sys.modules} & {'opentelemetry', 'prometheus_client'})"
    )
    done = python(program, check=True)
    assert done.stdout.strip() == "set()"
