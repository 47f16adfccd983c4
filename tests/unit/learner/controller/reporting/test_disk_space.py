"""A disk that hangs keeps no scrape waiting."""

import threading
from types import SimpleNamespace

from slipstream.extensions.prometheus import controller as run_collector
from slipstream.extensions.prometheus.controller import DiskSpace
from support.rigs.waiting import until


def values(disk: DiskSpace) -> dict[str, float]:
    return {metric.name: metric.samples[0].value for metric in disk.collect()}


async def test_a_scrape_shows_what_the_disk_said_before(tmp_path, monkeypatch):
    answers = threading.Semaphore(0)
    requests = []

    def usage(folder) -> SimpleNamespace:
        requests.append(folder)
        answers.acquire()
        return SimpleNamespace(total=100, free=100 - len(requests))

    monkeypatch.setattr(run_collector.shutil, "disk_usage", usage)
    disk = DiskSpace(tmp_path)
    # The disk hangs: however many scrapes come, one thread asks.
    assert [values(disk) for _ in range(5)] == [{}] * 5
    await until(lambda: requests == [tmp_path])
    answers.release()
    await until(lambda: values(disk))
    assert values(disk) == {
        "slipstream_disk_size_bytes": 100,
        "slipstream_disk_free_bytes": 99,
    }
    await until(lambda: len(requests) == 2)
    answers.release()
    await until(lambda: values(disk)["slipstream_disk_free_bytes"] == 98)
    answers.release()


async def test_a_disk_that_is_gone_shows_nothing(tmp_path):
    disk = DiskSpace(tmp_path / "missing")
    await until(lambda: disk._asking.done())
    assert values(disk) == {}
