"""What a server fetches from storage: the bytes that were written, or an error and no version."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights.server import Fetched, StoredWeights
from slipstream.extensions.stored_weights.storage import Storage, on_the_wire
from slipstream.v1 import weights_pb2
from support.rigs.stored_versions import (
    BUCKETS,
    Content,
    StoredVersions,
    changed_content,
    first_content,
)
from support.rigs.waiting import LIMIT_S

NEVER = threading.Event()


def opened(url: str, folder: Path, **settings: Any) -> StoredWeights:
    return StoredWeights(WeightsSection(storage_url=url, **settings), folder)


def all_bytes(content: Content) -> bytes:
    return b"".join(data.tobytes() for data in content)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return str(tmp_path / "storage")
    return f"memory://{tmp_path.name}"


def three_versions(versions: StoredVersions) -> list[tuple[weights_pb2.StoredWeights, Content]]:
    contents = [first_content()]
    contents.append(changed_content(contents[0], share=0.01, seed=1))
    contents.append(changed_content(contents[1], share=0.02, seed=2))
    return [
        (versions.write(step, content, whole=step == 0), content)
        for step, content in enumerate(contents)
    ]


def test_a_whole_version_and_its_chain_arrive_bit_for_bit(url: str, tmp_path: Path) -> None:
    server = opened(url, tmp_path / "a")
    versions = StoredVersions(url)
    found: list[Fetched] = []
    for manifest, content in three_versions(versions):
        found.append(server.fetch(manifest, NEVER))
        assert found[-1].path.read_bytes() == all_bytes(content)
    assert [each.num_links for each in found] == [1, 1, 1]
    assert found[1].num_bytes < found[0].num_bytes / 10


def test_a_server_that_was_away_takes_the_links_that_it_lacks(url: str, tmp_path: Path) -> None:
    (first, _), _, (third, content) = three_versions(StoredVersions(url))
    server = opened(url, tmp_path / "away")
    server.fetch(first, NEVER)
    fetched = server.fetch(third, NEVER)
    assert fetched.num_links == 2
    assert fetched.path.read_bytes() == all_bytes(content)


def test_a_version_that_is_here_already_costs_its_manifest_only(url: str, tmp_path: Path) -> None:
    (manifest, _), *_ = three_versions(StoredVersions(url))
    server = opened(url, tmp_path / "again")
    server.fetch(manifest, NEVER)
    assert server.fetch(manifest, NEVER).num_bytes == manifest.num_bytes


def objects(root: Path, version: int) -> list[Path]:
    return sorted(p for p in (root / "run" / f"v{version}").iterdir() if p.name != "manifest")


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
def test_a_damaged_link_is_named_and_leaves_no_version(tmp_path, damage, said):
    root = tmp_path / "storage"
    (first, old), (second, content), _ = three_versions(StoredVersions(str(root)))
    server = opened(str(root), tmp_path / "a")
    server.fetch(first, NEVER)
    kept = objects(root, 1)[0].read_bytes()
    damage(objects(root, 1)[0])
    with pytest.raises(WeightSyncError, match=said):
        server.fetch(second, NEVER)
    # Mended, the next fetch begins with the whole version, since the file may hold half of a link.
    objects(root, 1)
    (root / "run" / "v1" / "0-00000").write_bytes(kept)
    fetched = server.fetch(second, NEVER)
    assert fetched.num_links == 2
    assert fetched.path.read_bytes() == all_bytes(content)
    assert old is not content


def test_a_payload_that_its_manifest_describes_wrong_is_an_error_of_the_publish(tmp_path):
    root = str(tmp_path / "storage")
    versions = StoredVersions(root)
    (first, _), *_ = three_versions(versions)
    server = opened(root, tmp_path / "a")
    server.fetch(first, NEVER)
    changed = versions.chain[1].delta.changed
    # One more or less, so that it is as long.
    near = [[*changed[:1], changed[1] + more, *changed[2:]] for more in (1, -1)]
    as_long = [c for c in near if on_the_wire(BUCKETS, c) == on_the_wire(BUCKETS, changed)]
    changed[:] = as_long[0]
    with pytest.raises(WeightSyncError, match="bucket 1: a payload should have"):
        server.fetch(versions.manifest("run/wrong"), NEVER)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_manifest_is_refused(tmp_path: Path, damage: Any) -> None:
    root = tmp_path / "storage"
    (manifest, _), *_ = three_versions(StoredVersions(str(root)))
    damage(root / "run" / "v0" / "manifest")
    with pytest.raises(WeightSyncError, match="manifest"):
        opened(str(root), tmp_path / "a").fetch(manifest, NEVER)


def test_a_manifest_of_a_version_written_again_is_another_one(tmp_path: Path) -> None:
    root = str(tmp_path / "storage")
    versions = StoredVersions(root)
    manifest = versions.write(0, first_content(), whole=True)
    # A trainer that was killed and resumed may write other bytes for the same step.
    versions.write(0, changed_content(first_content(), share=0.5, seed=1), whole=True)
    with pytest.raises(WeightSyncError, match="other bytes in run/v0/manifest"):
        opened(root, tmp_path / "a").fetch(manifest, NEVER)


def test_storage_that_hangs_is_named_with_its_limit(tmp_path, monkeypatch):
    root = str(tmp_path / "storage")
    (manifest, _), *_ = three_versions(StoredVersions(root))
    server = opened(root, tmp_path / "a", storage_deadline_s=1.0)
    release = threading.Event()
    monkeypatch.setattr(
        "fsspec.implementations.local.LocalFileSystem.cat_file",
        lambda *_, **__: release.wait(LIMIT_S) and b"",
    )
    with pytest.raises(WeightSyncError, match=r"within 1 s \(weights.storage_deadline_s\)"):
        server.fetch(manifest, NEVER)
    release.set()


def test_an_abandoned_fetch_ends_at_once(tmp_path: Path) -> None:
    root = str(tmp_path / "storage")
    (manifest, _), *_ = three_versions(StoredVersions(root))
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(WeightSyncError, match="abandoned"):
        opened(root, tmp_path / "a").fetch(manifest, abandoned)


def test_a_full_disk_of_the_server_is_an_error_of_the_publish(tmp_path, monkeypatch):
    root = str(tmp_path / "storage")
    (manifest, content), *_ = three_versions(StoredVersions(root))
    server = opened(root, tmp_path / "a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightSyncError, match="No space left"):
            server.fetch(manifest, NEVER)
    assert server.fetch(manifest, NEVER).path.read_bytes() == all_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [(Path.unlink, "No such file"), (truncate, "length is greater than file size")],
)
def test_a_fetched_file_that_is_gone_or_cut_is_fetched_again(tmp_path, spoil, cause):
    root = str(tmp_path / "storage")
    (first, _), (second, content), _ = three_versions(StoredVersions(root))
    server = opened(root, tmp_path / "a")
    spoil(server.fetch(first, NEVER).path)
    with pytest.raises(WeightSyncError, match=cause):
        server.fetch(second, NEVER)
    assert server.fetch(second, NEVER).path.read_bytes() == all_bytes(content)


def test_a_url_that_fsspec_cannot_open_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights.storage_url must be .* got nothing://x"):
        Storage("nothing://x")


def test_a_manifest_out_of_the_bounds_of_messages_is_refused(url: str, tmp_path: Path) -> None:
    versions = StoredVersions(url)
    versions.write(0, first_content(), whole=True)
    versions.chain[0].bucket_digests.append(bytes(65))
    with pytest.raises(WeightSyncError, match=r"odd is no manifest: .*must have at most 64 bytes"):
        opened(url, tmp_path / "a").fetch(versions.manifest("odd"), NEVER)
