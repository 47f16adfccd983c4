"""Versions in a real S3 store, moto's server, behind a link that this test slows down or cuts.

Neither moto nor s3fs is a dependency: `make test-tools` installs them in an environment of the
same Python, and `SLIPSTREAM_S3` names another one.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.core.machine.address import free_port
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights.server import StoredWeights
from support.rigs import tools
from support.rigs.stored_versions import (
    StoredVersions,
    changed_content,
    first_content,
    soon,
)
from support.rigs.waiting import LIMIT_S, until

PLACE = tools.folder("s3")
SECRET = "not-a-secret-of-anybody"
NEVER = threading.Event()


class Link:
    """A TCP proxy in a thread, with a speed; 0 bytes a second: nothing passes any more."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s = 1e9
        self._target = port
        self.num_bytes = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = free_port("127.0.0.1")
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(LIMIT_S)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    async def _end(self) -> None:
        """Leaves no connection to a loop that stands still."""
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upward, downward = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._copy(reader, downward), self._copy(upward, writer))

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(16_384):
                await until(lambda: self.bytes_per_s)
                await asyncio.sleep(len(data) / self.bytes_per_s)
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of an S3 store with a bucket `weights`."""
    if not PLACE.exists():
        pytest.skip(f"no s3fs and moto here: {tools.HOW}")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    sys.path.append(str(PLACE / "lib" / version / "site-packages"))
    port = free_port("127.0.0.1")
    process = subprocess.Popen(
        [str(PLACE / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until_s
                time.sleep(0.1)
        import s3fs

        keys = {
            "key": "anybody",
            "secret": SECRET,
            "endpoint_url": f"http://127.0.0.1:{port}",
        }
        s3fs.S3FileSystem(**keys, skip_instance_cache=True).mkdir("weights")
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def link(store: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    import fsspec.config

    link = Link(store)
    # The names that users set in the environment of a program, which fsspec reads at its import.
    fsspec.config.set_conf_env(
        fsspec.config.conf, {"FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{link.port}"}
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    yield link
    fsspec.config.conf.pop("s3", None)
    link.close()


def server(folder: Path, url: str, *, limit_s: float = 60.0) -> StoredWeights:
    return StoredWeights(
        WeightsSection(storage_url=url, storage_deadline_s=limit_s), folder
    )


def test_a_chain_in_an_object_store_arrives_bit_for_bit(
    link: Link, tmp_path: Path
) -> None:
    url = "s3://weights/chain"
    versions = StoredVersions(url)
    content = first_content()
    reader = server(tmp_path / "a", url)
    sizes = []
    for step in range(3):
        manifest = versions.write(step, content, whole=step == 0)
        before = link.num_bytes
        fetched = reader.fetch(manifest, NEVER)
        sizes.append(link.num_bytes - before)
        assert fetched.path.read_bytes() == b"".join(data.tobytes() for data in content)
        content = changed_content(content, share=0.01, seed=step)
    assert sizes[1] < sizes[0] / 5
    late = server(tmp_path / "late", url).fetch(manifest, NEVER)
    assert late.num_links == 3
    keys = versions.storage.keys("run", soon())
    assert f"run/v2/{'manifest'}" in keys
    versions.storage.remove(keys, soon())
    assert versions.storage.keys("run", soon()) == []
    assert all(
        SECRET.encode() not in p.read_bytes()
        for p in tmp_path.rglob("*")
        if p.is_file()
    )


def test_a_slow_link_takes_its_time_and_a_dead_one_its_limit(
    link: Link, tmp_path: Path
) -> None:
    url = "s3://weights/slow"
    versions = StoredVersions(url)
    content = first_content()
    whole_bytes = versions.write(0, content, whole=True)
    content = changed_content(content, share=0.01, seed=1)
    delta = versions.write(1, content, whole=False)
    reader = server(tmp_path / "a", url, limit_s=20.0)
    link.bytes_per_s = 100_000.0
    slow = reader.fetch(whole_bytes, NEVER)
    quick = reader.fetch(delta, NEVER)
    print(f"whole {slow.num_bytes} B in {slow.seconds:.2f} s, ", end="")
    print(f"changes {quick.num_bytes} B in {quick.seconds:.2f} s")
    assert 0 < quick.num_bytes < slow.num_bytes / 2
    link.bytes_per_s = 0.0
    stuck = server(tmp_path / "b", url, limit_s=2.0)
    with pytest.raises(
        WeightSyncError, match=r"s3://weights/slow could not read .* within 2 s"
    ):
        stuck.fetch(delta, NEVER)


def test_an_object_that_is_gone_is_named_without_credentials(
    link: Link, tmp_path: Path
) -> None:
    url = "s3://weights/gone"
    versions = StoredVersions(url)
    manifest = versions.write(0, first_content(), whole=True)
    versions.storage.remove(["run/v0/1-00000"], soon())
    with pytest.raises(
        WeightSyncError, match="could not read run/v0/1-00000"
    ) as raised:
        server(tmp_path / "a", url).fetch(manifest, NEVER)
    assert SECRET not in str(raised.value)


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(link: Link) -> None:
    storage = StoredVersions("s3://no-such-bucket-of-ours/x").storage
    for _ in range(2):
        with pytest.raises(
            WeightSyncError, match="could not write run/x.* does not exist"
        ):
            storage.write("run/x", memoryview(b"data"), soon())
