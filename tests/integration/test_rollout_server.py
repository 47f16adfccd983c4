"""The program as a launcher starts it: real engine, real environment worker, scripted fleet."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from slipstream.core.configuration.config_file import dump_config, parse_config
from slipstream.core.types import PolicyVersion, Status
from slipstream.protocol.codec import pack_tokens, unpack_logprobs, version_to_pb
from slipstream.v1 import environment_pb2, fleet_pb2, weights_pb2
from support.fakes.fake_fleet import LIMIT_S, SAMPLING, Connection, FakeFleet
from support.fakes.gloo_sender import GlooSender, layout_of
from support.fakes.tiny_models import make_model_folder
from support.rigs.run_processes import descendants, until_gone

START_LIMIT_S = 150.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A resolved config file, with a model beside it."""
    folder = tmp_path_factory.mktemp("run")
    model = make_model_folder(folder / "model")
    table = {
        "run": {"name": "test", "steps": 1, "dir": str(folder)},
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-3},
        "sampling": {"max_reply_tokens": 4, "max_episode_tokens": 32},
        "rollout_server": {"max_episodes": 64, "threads": 1, "enforce_eager": True},
        "controller": {"stall_timeout_s": 5.0},
    }
    path = folder / "resolved.toml"
    path.write_text(dump_config(parse_config(table, source="test")))
    return path


async def start(
    settings: Path, address: str, *options: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "slipstream.rollout_server",
        "--config",
        str(settings),
        "--controller",
        address,
        "--server-id",
        "server-1",
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(heartbeat_s=0.1, heartbeat_timeout_s=2.0) as fleet:
        yield fleet


async def publish(
    connection: Connection, weights: dict, step: int
) -> weights_pb2.Probe:
    """A whole publish with a probe, as the learner does it; returns what the server answered."""
    layout = layout_of(weights)
    sender = GlooSender(f"communicator-{step}")
    version = version_to_pb(PolicyVersion(0, step))
    connection.send(
        prepare=fleet_pb2.PreparePublish(publish_id=f"p{step}", version=version)
    )
    await connection.publish_phase(f"p{step}", fleet_pb2.PUBLISH_PHASE_READY)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, layout, weights))
    order = sender.order(f"p{step}", step)
    order.new_communicator = True
    connection.send(
        receive=fleet_pb2.ReceiveWeights(order=order, layout=layout, first_rank=1)
    )
    loaded = await connection.publish_phase(f"p{step}", fleet_pb2.PUBLISH_PHASE_LOADED)
    assert list(loaded.bucket_digests) == await sending
    tokens = np.asarray([1, 4, 5, 3, 9, 1, 30, 31], dtype=np.uint32)
    probe = weights_pb2.Probe(token_ids=pack_tokens(tokens), lengths=[5, 3])
    connection.send(
        commit=fleet_pb2.CommitPublish(
            publish_id=f"p{step}",
            version=version,
            probe=probe,
            bucket_digests=loaded.bucket_digests,
        )
    )
    serving = await connection.publish_phase(
        f"p{step}", fleet_pb2.PUBLISH_PHASE_SERVING
    )
    assert len(unpack_logprobs(serving.probe_logprobs)) == 6
    connection.send(
        probe_verdict=fleet_pb2.ProbeVerdict(publish_id=f"p{step}", passed=True)
    )
    return serving


@pytest.mark.long
async def test_the_program_serves_a_group_and_drains(settings, fleet, monkeypatch):
    # A short path: those of sockets have a limit.
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    server = await start(settings, fleet.address, "--server-id", "server-7")
    try:
        connection = await fleet.joined(START_LIMIT_S)
        assert connection.hello.server_id == "server-7"
        assert connection.hello.max_model_len == 33
        spec = environment_pb2.EnvironmentSpec(
            name="echo",
            reference="slipstream.environments.echo:Echo",
            args_json="{}",
            timeout_s=10,
            num_workers=1,
        )
        connection.send(environment=fleet_pb2.EnvironmentOrder(spec=spec))
        report = await connection.wait_for("environment")
        assert report.num_tasks > 0, report.failure.message
        weights = load_file(settings.parent / "model" / "model.safetensors")
        await publish(connection, weights, 1)
        for number in range(8):
            connection.lease(f"g{number}", environment="echo", sampling=SAMPLING)
        trajectories = await fleet.wait_trajectories(32)
        assert {t.status for t in trajectories} <= {Status.COMPLETED, Status.TRUNCATED}
        versions = {span.version for t in trajectories for span in t.version_spans}
        assert versions == {PolicyVersion(0, 1)}
        beat = await connection.wait_quiet()
        assert beat.generated_tokens == beat.ended_tokens
        assert beat.ended_tokens == sum(t.num_sampled_tokens for t in trajectories)
        started = descendants(server.pid)
        assert len(started) >= 2
        server.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(server.communicate(), LIMIT_S)
        assert server.returncode == 0, stderr.decode()
        await connection.wait_for("drained")
        await until_gone(started)
    finally:
        if server.returncode is None:
            server.kill()
    assert list((settings.parent / "test" / "logs").glob("*-environment-echo-0.log"))
    # Neither its own files nor vLLM's are left, but for what torch keeps for later programs.
    leftovers = [
        path
        for path in temporary.iterdir()
        if not path.name.startswith("torchinductor_")
    ]
    shutil.rmtree(temporary)
    assert leftovers == []


async def test_nothing_outlives_a_killed_launcher(
    settings: Path, fleet: FakeFleet
) -> None:
    arguments = [
        sys.executable,
        "-m",
        "slipstream.rollout_server",
        "--config",
        str(settings),
        "--controller",
        fleet.address,
        "--server-id",
        "server-1",
    ]
    code = f"import subprocess; subprocess.run({arguments!r})"
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        connection = await fleet.joined(START_LIMIT_S)
        started = descendants(launcher.pid)
        assert len(started) >= 2
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        await launcher.wait()
    await asyncio.wait_for(connection.ended.wait(), LIMIT_S)
    await until_gone(started)
