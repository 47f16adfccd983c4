"""A whole rollout server that takes its weights from storage, with an engine without a model."""

import threading
from pathlib import Path

import pytest
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.extensions.stored_weights.server import StoredWeights
from slipstream.protocol.codec import version_to_pb
from slipstream.v1 import fleet_pb2, weights_pb2
from support.fakes.fake_engine import DIGESTS
from support.rigs.stored_versions import StoredVersions, changed_content, first_content
from support.rigs.waiting import LIMIT_S

READY = fleet_pb2.PUBLISH_PHASE_READY
FAILED = fleet_pb2.PUBLISH_PHASE_FAILED
SERVING = fleet_pb2.PUBLISH_PHASE_SERVING


@pytest.fixture
def config(config: Config, tmp_path: Path) -> Config:
    weights = config.weights.model_copy(
        update={"storage_url": str(tmp_path / "storage")}
    )
    return config.model_copy(update={"weights": weights})


def order_of(publish_id: str, step: int) -> weights_pb2.PublishOrder:
    where = weights_pb2.Communicator(communicator_id=publish_id, transport="storage")
    version = version_to_pb(PolicyVersion(0, step))
    return weights_pb2.PublishOrder(
        publish_id=publish_id,
        version=version,
        communicator=where,
        new_communicator=True,
    )


async def serve_stored(connection, step, manifest, digests=DIGESTS):
    """A whole publish through storage, as the controller makes it."""
    publish_id = f"s{step}"
    version = version_to_pb(PolicyVersion(0, step))
    connection.send(
        prepare=fleet_pb2.PreparePublish(
            publish_id=publish_id, version=version, stored=manifest
        )
    )
    await connection.publish_phase(publish_id, READY)
    connection.send(receive=fleet_pb2.ReceiveWeights(order=order_of(publish_id, step)))
    connection.send(
        commit=fleet_pb2.CommitPublish(
            publish_id=publish_id, version=version, bucket_digests=digests
        )
    )
    await connection.publish_phase(publish_id, SERVING)


async def test_a_server_fetches_and_serves_one_version_after_the_other(
    start_server, config: Config, tmp_path: Path
) -> None:
    versions = StoredVersions(str(tmp_path / "storage"))
    content = first_content()
    async with start_server(config) as server:
        connection = await server.join(step=None)
        assert connection.hello.from_storage
        await serve_stored(connection, 1, versions.write(1, content, whole=True))
        content = changed_content(content, share=0.01, seed=1)
        await serve_stored(connection, 2, versions.write(2, content, whole=False))
        assert server.engine.version == PolicyVersion(0, 2)
        # Workers read what lies in the folder of the run.
        (file,) = config.run_dir.glob("fetched/server-0/weights")
        assert file.read_bytes() == b"".join(data.tobytes() for data in content)
        # A server hands what it was told to load to its engine with layout and file.
        order, layout = server.engine.orders[-1]
        assert order.communicator.path == str(file.resolve())
        assert len(layout.tensors) == 4


async def test_a_server_serves_its_groups_while_it_fetches(
    start_server, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = StoredVersions(str(tmp_path / "storage"))
    fetch = StoredWeights.fetch
    gate = threading.Event()
    async with start_server(config) as server:
        connection = await server.join(step=None)
        await serve_stored(
            connection, 1, versions.write(1, first_content(), whole=True)
        )

        def slow(*arguments):
            gate.wait(LIMIT_S)
            return fetch(*arguments)

        monkeypatch.setattr(StoredWeights, "fetch", slow)
        stored = versions.write(2, first_content(), whole=True)
        prepare = fleet_pb2.PreparePublish(publish_id="s2", stored=stored)
        connection.send(prepare=prepare)
        connection.lease("g1")
        trajectories = await server.fleet.wait_trajectories(4)
        assert {span.version for t in trajectories for span in t.version_spans} == {
            PolicyVersion(0, 1)
        }
        gate.set()
        await connection.publish_phase("s2", READY)


async def test_a_server_says_what_it_could_not_fetch_and_serves_on(
    start_server, config, tmp_path
):
    versions = StoredVersions(str(tmp_path / "storage"))
    async with start_server(config) as server:
        connection = await server.join(step=None)
        stored = versions.write(1, first_content(), whole=True)
        await serve_stored(connection, 1, stored)
        stored.key = "run/nowhere/manifest"
        connection.send(
            prepare=fleet_pb2.PreparePublish(publish_id="s2", stored=stored)
        )
        report = await connection.publish_phase("s2", FAILED)
        assert "could not read run/nowhere/manifest" in report.message
        connection.lease("g1")
        assert len(await server.fleet.wait_trajectories(4)) == 4
