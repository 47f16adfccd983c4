"""Versions that two trainer ranks write to storage: whole ones, chains, failures, what is left."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from slipstream.core.errors import RunFailed
from slipstream.core.settings.sections import WeightsSection
from slipstream.extensions.stored_weights import trainer as version_writer
from slipstream.extensions.stored_weights.server import StoredWeights
from slipstream.extensions.stored_weights.storage import Storage
from slipstream.extensions.stored_weights.trainer import RankObjects, StorageWriter
from slipstream.learner.trainer.weights.weight_publisher import Published
from slipstream.learner.trainer.weights.weight_stream import WeightStream
from slipstream.protocol.weights.buckets import TensorSpec
from slipstream.v1 import trainer_pb2, trajectory_pb2, weights_pb2
from support.ranks.thread_ranks import (
    PlainFilling,
    PlainModel,
    ThreadRanks,
    packed,
    run_ranks,
)
from support.rigs.waiting import LIMIT_S

BUCKET_BYTES = 8_000
SHAPES = {"a": (30_000, 0), "b": (3, 0), "c": (20_000, 1), "d": (5, 1)}
PROBE = weights_pb2.Probe(lengths=[2])


class Client:
    """The controller, as the writer knows it."""

    def __init__(self) -> None:
        self.reports: list[trainer_pb2.StoredReport] = []
        self.needed: list[str] = []
        self.is_away = False
        self.epoch = "1"

    def report_stored(
        self, report: trainer_pb2.StoredReport
    ) -> trainer_pb2.StoredReceipt:
        if self.is_away:
            raise RunFailed("the controller is away")
        self.reports.append(report)
        return trainer_pb2.StoredReceipt(needed=self.needed)


class Trainer:
    """Two ranks, which write a version for each call of `change`."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root, self.client = root, Client()
        self.weights = WeightsSection(storage_url=str(root), **settings)
        random = torch.Generator().manual_seed(0)
        self.tensors = {
            TensorSpec(name, "bfloat16", (size,), sender): torch.randn(
                size, generator=random
            ).to(torch.bfloat16)
            for name, (size, sender) in SHAPES.items()
        }
        self.contents: list[bytes] = []

    def opened(self, ranks):
        """The weights of a rank, and what writes them."""
        filling = PlainFilling(self.tensors, ranks)
        stream = WeightStream(PlainModel(ranks), filling, bucket_bytes=BUCKET_BYTES)
        writer = StorageWriter(
            Published(stream),
            self.weights,
            ranks=ranks,
            client=self.client,
        )
        return stream, writer

    def write(self, *changes, first=0, close=False):
        """Writes a version after each change, beginning with version `first`."""

        def on_rank(ranks: ThreadRanks) -> None:
            stream, writer = self.opened(ranks)
            for step, change in enumerate(changes, first):
                if ranks.is_main:
                    change()
                    self.note(stream)
                ranks.gather_bytes(b"")
                order = trainer_pb2.StoreOrder(
                    version=trajectory_pb2.PolicyVersion(step=step),
                    folder=f"run/{step}-{len(self.contents)}",
                )
                assert writer.is_idle
                writer.store(order, PROBE)
                writer._thread.join()
                ranks.gather_bytes(b"")
            if close:
                writer.close()

        before = len(self.client.reports)
        run_ranks(2, on_rank)
        return self.client.reports[before:]

    def note(self, stream: WeightStream) -> None:
        """Notes what the version holds that is written now."""
        self.contents.append(
            b"".join(packed(bucket, self.tensors) for bucket in stream.buckets)
        )

    def few(self) -> None:
        """Changes one of a hundred elements."""
        for tensor in self.tensors.values():
            tensor.view(torch.int16)[:: 100 + len(self.contents)] ^= 1

    def fetched(self, report: trainer_pb2.StoredReport, folder: Path) -> bytes:
        server = StoredWeights(self.weights, folder)
        return server.fetch(report.stored, threading.Event()).path.read_bytes()

    def files(self) -> set[str]:
        return {
            str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file()
        }


def same() -> None:
    """Leaves the weights as they are."""


def meddle(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, bytes], None]) -> None:
    """Lets `act` see each file before it is written; it may raise."""
    write = LocalFileSystem.pipe_file

    def meddled(
        files: LocalFileSystem, path: str, value: bytes, **options: Any
    ) -> None:
        act(path, value)
        write(files, path, value, **options)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", meddled)


def test_versions_of_two_ranks_arrive_bit_for_bit(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")
    reports = trainer.write(same, trainer.few, trainer.few)
    assert [report.error for report in reports] == ["", "", ""]
    assert trainer.fetched(reports[-1], tmp_path / "late") == trainer.contents[-1]
    whole_bytes, *deltas = (report.num_bytes for report in reports)
    assert whole_bytes == len(trainer.contents[0])
    assert max(deltas) < whole_bytes / 10
    assert all(report.whole_bytes == whole_bytes for report in reports)
    assert reports[0].probe == PROBE


def test_every_nth_version_is_whole_and_the_chain_before_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(version_writer, "WHOLE_EVERY", 2)
    trainer = Trainer(tmp_path / "s")
    reports = trainer.write(same, *[trainer.few] * 4)
    num_buckets = len(trainer.contents[0])
    assert [report.num_bytes == num_buckets for report in reports] == [
        True,
        False,
        True,
        False,
        True,
    ]
    # Only the newest version lies there: whole objects of both ranks, and the manifest.
    assert {name.split("/")[1] for name in trainer.files()} == {"4-5"}
    assert trainer.fetched(reports[-1], tmp_path / "a") == trainer.contents[-1]


def test_a_chain_longer_than_the_whole_is_not_continued(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")

    def many() -> None:
        for tensor in trainer.tensors.values():
            tensor.view(torch.int16)[:] ^= 1

    reports = trainer.write(same, many, trainer.few, trainer.few)
    num_buckets = len(trainer.contents[0])
    assert [report.num_bytes == num_buckets for report in reports] == [
        True,
        True,
        True,
        False,
    ]
    assert trainer.fetched(reports[-1], tmp_path / "a") == trainer.contents[-1]


def test_a_chain_from_which_a_server_fetches_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(version_writer, "WHOLE_EVERY", 1)
    trainer = Trainer(tmp_path / "s")
    trainer.client.needed = ["run/0-1/manifest"]
    first, *_ = trainer.write(same, trainer.few, trainer.few)
    assert {name.split("/")[1] for name in trainer.files()} == {"0-1", "2-3"}
    assert trainer.fetched(first, tmp_path / "slow") == trainer.contents[0]


def test_what_a_killed_trainer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")
    trainer.write(same, trainer.few)
    half = tmp_path / "s" / "run" / "2-9" / "0-00000"
    half.parent.mkdir()
    half.write_bytes(b"half of an object")
    other = tmp_path / "s" / "another-run" / "0-1" / "manifest"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another run")
    (report,) = trainer.write(trainer.few, first=2)
    assert {name.split("/")[1] for name in trainer.files()} == {"2-3", "0-1"}
    assert other.exists()
    assert trainer.fetched(report, tmp_path / "a") == trainer.contents[-1]


def test_what_only_an_earlier_trainer_knew_stays_while_it_is_needed(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path / "s")
    (first,) = trainer.write(same)
    trainer.client.needed = [first.stored.key]
    trainer.write(trainer.few, first=1)
    assert trainer.fetched(first, tmp_path / "slow") == trainer.contents[0]


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path / "s")

    def full(path: str, _: bytes) -> None:
        if path.endswith("run/1-2/0-00000"):
            raise OSError(28, "No space left on device")

    meddle(monkeypatch, full)
    good, bad, again = trainer.write(same, trainer.few, trainer.few)
    assert "could not write run/1-2/0-00000" in bad.error
    assert "No space left" in bad.error
    assert good.error == again.error == ""
    # The one after a failure is whole: the ranks may have different bases.
    assert again.num_bytes == len(trainer.contents[0])
    assert trainer.fetched(again, tmp_path / "a") == trainer.contents[-1]
    assert {name.split("/")[1] for name in trainer.files()} == {"2-3"}


def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.write_text("a file where a folder should be")
    (report,) = Trainer(root).write(same)
    assert f"storage {root} could not write run/0-1/0-00000" in report.error


def test_a_rank_that_cannot_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tmp_path / "s")
    write = Storage.write

    def refuse(storage: Storage, key: str, data: memoryview, until: Any) -> None:
        if key.startswith("run/0-1/1-"):
            key = "\0"
        write(storage, key, data, until)

    monkeypatch.setattr(Storage, "write", refuse)
    bad, good = trainer.write(same, same)
    assert bad.error == "rank 1 could not write version run/0-1: its log says why"
    assert good.error == ""
    assert trainer.fetched(good, tmp_path / "a") == trainer.contents[-1]


@pytest.mark.parametrize("sender", [0, 1])
def test_an_error_that_nobody_foresaw_is_reported_too(sender, tmp_path, monkeypatch):
    trainer = Trainer(tmp_path / "s", storage_deadline_s=20.0)
    write = RankObjects.write

    def fail(objects: RankObjects, folder: str, *args: Any, **options: Any) -> Any:
        if folder == "run/0-1" and objects._sender == sender:
            raise MemoryError("no room for a copy")
        return write(objects, folder, *args, **options)

    monkeypatch.setattr(RankObjects, "write", fail)
    bad, good = trainer.write(same, same)
    assert bad.error == (
        "rank 1 could not write version run/0-1: its log says why"
        if sender
        else "MemoryError: no room for a copy"
    )
    assert good.error == ""
    assert trainer.fetched(good, tmp_path / "a") == trainer.contents[-1]


def test_no_rank_waits_for_one_that_still_writes_a_version_that_was_given_up(
    tmp_path, monkeypatch
):
    trainer = Trainer(tmp_path / "s", storage_deadline_s=60.0)
    has_begun = threading.Event()
    over = threading.Event()
    written = threading.Event()

    def slow(path: str, _: bytes) -> None:
        if path.endswith("run/1/1-00000"):
            has_begun.set()
            over.wait(LIMIT_S)
            written.set()
        if path.endswith("run/1/0-00000"):
            has_begun.wait(LIMIT_S)
            raise OSError("no permission")

    meddle(monkeypatch, slow)

    def on_rank(ranks: ThreadRanks) -> None:
        stream, writer = trainer.opened(ranks)
        writer.store(trainer_pb2.StoreOrder(folder="run/1"), PROBE)
        if ranks.is_main:
            trainer.note(stream)
            writer._thread.join(LIMIT_S)
        ranks.gather_bytes(b"")
        writer.store(trainer_pb2.StoreOrder(folder="run/2"), PROBE)
        assert not written.is_set()
        writer._thread.join()

    try:
        run_ranks(2, on_rank)
    finally:
        over.set()
    bad, good = trainer.client.reports
    assert "no permission" in bad.error
    assert good.error == ""
    assert trainer.fetched(good, tmp_path / "a") == trainer.contents[-1]


def test_a_manifest_is_written_after_all_that_it_names(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path / "s")
    write = Storage.write
    done = list[str]()

    def noted(storage: Storage, key: str, data: memoryview, until: Any) -> None:
        write(storage, key, data, until)
        if key.endswith("manifest"):
            message = weights_pb2.StoredManifest.FromString(bytes(data))
            assert {
                stored_object.key
                for link in message.links
                for stored_object in link.objects
            } <= set(done)
        done.append(key)

    monkeypatch.setattr(Storage, "write", noted)
    assert [report.error for report in trainer.write(same, trainer.few)] == ["", ""]
    assert done[-1].endswith("manifest")


def test_a_version_that_the_controller_never_heard_of_is_no_base(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path / "s")

    def away() -> None:
        trainer.client.is_away = True

    def back() -> None:
        trainer.client.is_away = False
        trainer.few()

    *_, report = trainer.write(same, away, back)
    assert report.num_bytes == len(trainer.contents[0])
    assert trainer.fetched(report, tmp_path / "a") == trainer.contents[-1]


def test_after_a_new_registration_the_next_version_is_whole(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")

    def another_trainer_had_the_place() -> None:
        trainer.client.epoch = "2"
        shutil.rmtree(tmp_path / "s" / "run")
        trainer.few()

    *_, report, next_one = trainer.write(
        same, trainer.few, another_trainer_had_the_place, trainer.few
    )
    num_buckets = len(trainer.contents[0])
    assert report.num_bytes == num_buckets > next_one.num_bytes
    assert trainer.fetched(next_one, tmp_path / "a") == trainer.contents[-1]


def test_what_another_trainer_writes_after_the_report_stays(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")
    later = tmp_path / "s" / "run" / "1-7" / "0-00000"
    report_stored = trainer.client.report_stored

    def taken_over(report: trainer_pb2.StoredReport) -> trainer_pb2.StoredReceipt:
        later.parent.mkdir()
        later.write_bytes(b"of the trainer that has the place now")
        return report_stored(report)

    trainer.client.report_stored = taken_over  # type: ignore[method-assign]
    trainer.write(same)
    assert later.exists()


def test_a_trainer_that_leaves_a_run_that_goes_on_leaves_its_version(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path / "s")

    def on_rank(ranks: ThreadRanks) -> None:
        _, writer = trainer.opened(ranks)
        writer.store(trainer_pb2.StoreOrder(folder="run/1"), PROBE)
        writer._thread.join()
        ranks.gather_bytes(b"")
        writer.close(keep=True)

    run_ranks(2, on_rank)
    (report,) = trainer.client.reports
    assert trainer.fetched(report, tmp_path / "a")


def test_at_the_end_nothing_of_the_run_is_left(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "s")
    trainer.write(same, trainer.few, close=True)
    assert trainer.files() == set()


def test_at_the_end_nothing_is_left_of_a_first_version_that_was_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path / "s")
    has_begun = threading.Event()
    over = threading.Event()

    def stuck(path: str, _: bytes) -> None:
        if path.endswith("/manifest"):
            has_begun.set()
            over.wait(LIMIT_S)
            raise OSError("the run is over")

    meddle(monkeypatch, stuck)

    def on_rank(ranks: ThreadRanks) -> None:
        _, writer = trainer.opened(ranks)
        writer.store(trainer_pb2.StoreOrder(folder="run/1"), PROBE)
        assert has_begun.wait(LIMIT_S)
        writer.close()

    try:
        run_ranks(2, on_rank)
        assert trainer.files() == set()
        # A run that is over has nothing to warn of.
        assert trainer.client.reports == []
        assert caplog.messages == [m for m in caplog.messages if "storage" not in m]
    finally:
        over.set()
