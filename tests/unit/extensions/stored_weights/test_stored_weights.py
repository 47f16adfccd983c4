"""What a server fetches from storage: the bytes that were written, or an error and no version."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights.server import Fetched, StoredWeights
from slipstream.extensions.stored_weights.storage import Storage, wire_bytes
from support.rigs.stored_versions import (
    BUCKETS,
    Content,
    StoredVersions,
    changed_content,
    first_content,
    soon,
)
from support.rigs.waiting import LIMIT_S

NEVER = threading.Event()


def all_bytes(content: Content) -> bytes:
    return b"".join(data.tobytes() for data in content)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "storage")
    return f"memory://{tmp_path.name}"


class Scene:
    """Three versions in storage, a whole one and two links, and a server that has none."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        self.versions = StoredVersions(url)
        first = first_content()
        second = changed_content(first, share=0.01, seed=1)
        self.contents = [first, second, changed_content(second, share=0.02, seed=2)]
        self.manifests = [
            self.versions.write(step, content, whole=step == 0)
            for step, content in enumerate(self.contents)
        ]
        self.server = self.opened()

    def opened(self, **settings: Any) -> StoredWeights:
        return StoredWeights(
            WeightsSection(storage_url=self.url, **settings), self._folder
        )

    def fetch(self, step: int) -> Fetched:
        """Has the server fetch a version, which is whole then."""
        fetched = self.server.fetch(self.manifests[step], NEVER)
        assert fetched.path.read_bytes() == all_bytes(self.contents[step])
        return fetched


@pytest.fixture
def scene(url: str, tmp_path: Path) -> Scene:
    return Scene(url, tmp_path / "server")


@pytest.fixture
def in_files(tmp_path: Path) -> Scene:
    """A scene whose storage is a folder."""
    return Scene(str(tmp_path / "storage"), tmp_path / "server")


def test_a_whole_version_and_its_chain_arrive_bit_for_bit(scene: Scene) -> None:
    fetches = [scene.fetch(step) for step in range(3)]
    assert [fetch.num_links for fetch in fetches] == [1, 1, 1]
    assert fetches[1].num_bytes < fetches[0].num_bytes / 10


def test_a_server_that_was_away_takes_the_links_that_it_lacks(scene: Scene) -> None:
    scene.fetch(0)
    assert scene.fetch(2).num_links == 2


def test_a_version_that_is_here_already_costs_its_manifest_only(scene: Scene) -> None:
    scene.fetch(0)
    assert scene.fetch(0).num_bytes == scene.manifests[0].num_bytes


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(10_000))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "has only [0-9]+ bytes of run/v1/0-00000, [0-9]+ were written"),
        (lengthen, "has more bytes of run/v1/0-00000, [0-9]+ were written"),
        (flip, "has other bytes in run/v1/0-00000 than were written"),
        (Path.unlink, "could not read run/v1/0-00000"),
    ],
)
def test_a_damaged_link_is_named_and_leaves_no_version(
    in_files: Scene, damage, said
) -> None:
    in_files.fetch(0)
    link = Path(in_files.url) / "run" / "v1" / "0-00000"
    content = link.read_bytes()
    damage(link)
    with pytest.raises(WeightSyncError, match=said):
        in_files.fetch(1)
    # Mended, the next fetch begins with the whole version, since the file may hold half of a link.
    link.write_bytes(content)
    assert in_files.fetch(1).num_links == 2


def test_a_payload_that_its_manifest_describes_wrong_is_an_error_of_the_publish(
    scene: Scene,
):
    scene.fetch(0)
    changed = scene.versions.chain[1].delta.changed
    # A further or less, so that it is as long.
    near = [[*changed[:1], changed[1] + more, *changed[2:]] for more in (1, -1)]
    sizes = [*map(wire_bytes, BUCKETS, changed)]
    changed[:] = next(c for c in near if [*map(wire_bytes, BUCKETS, c)] == sizes)
    with pytest.raises(WeightSyncError, match="bucket 1: a payload should have"):
        scene.server.fetch(scene.versions.manifest("run/wrong"), NEVER)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_manifest_is_refused(in_files: Scene, damage: Any) -> None:
    damage(Path(in_files.url) / "run" / "v0" / "manifest")
    with pytest.raises(WeightSyncError, match="manifest"):
        in_files.fetch(0)


def test_a_manifest_of_a_version_written_again_is_another_one(scene: Scene) -> None:
    # A trainer that was killed and resumed may write other bytes for the same step.
    scene.versions.write(
        0, changed_content(first_content(), share=0.5, seed=1), whole=True
    )
    with pytest.raises(WeightSyncError, match="other bytes in run/v0/manifest"):
        scene.fetch(0)


def test_storage_that_hangs_is_named_with_its_limit(
    in_files: Scene, monkeypatch
) -> None:
    in_files.server, release = (
        in_files.opened(storage_deadline_s=1.0),
        threading.Event(),
    )
    monkeypatch.setattr(
        "fsspec.implementations.local.LocalFileSystem.cat_file",
        lambda *_, **__: release.wait(LIMIT_S) and b"",
    )
    with pytest.raises(
        WeightSyncError, match=r"within 1 s \(weights.storage_deadline_s\)"
    ):
        in_files.fetch(0)
    release.set()


def test_an_abandoned_fetch_ends_at_once(scene: Scene) -> None:
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(WeightSyncError, match="abandoned"):
        scene.server.fetch(scene.manifests[0], abandoned)


def test_a_full_disk_of_the_server_is_an_error_of_the_publish(
    scene: Scene, monkeypatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightSyncError, match="No space left"):
            scene.fetch(0)
    scene.fetch(0)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [(Path.unlink, "No such file"), (truncate, "length is greater than file size")],
)
def test_a_fetched_file_that_is_gone_or_cut_is_fetched_again(
    scene: Scene, spoil, cause
) -> None:
    spoil(scene.fetch(0).path)
    with pytest.raises(WeightSyncError, match=cause):
        scene.fetch(1)
    scene.fetch(1)


def test_a_url_that_fsspec_cannot_open_is_a_wrong_setting() -> None:
    with pytest.raises(
        ValueError, match="weights.storage_url must be .* got nothing://x"
    ):
        Storage("nothing://x")


def test_a_manifest_out_of_the_bounds_of_messages_is_refused(scene: Scene) -> None:
    scene.versions.chain[0].bucket_digests.append(bytes(65))
    with pytest.raises(
        WeightSyncError, match=r"odd is no manifest: .*must have at most 64 bytes"
    ):
        scene.server.fetch(scene.versions.manifest("odd"), NEVER)


def test_what_is_not_in_storage_is_neither_listed_nor_removed(url: str) -> None:
    storage = Storage(url)
    assert storage.keys("run", soon()) == []
    storage.write("run/one", memoryview(b"x"), soon())
    storage.remove(["run/none", "run/one"], soon())
    assert storage.keys("run", soon()) == []
