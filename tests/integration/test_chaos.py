"""The oracle of `slipstream chaos` finds what is planted, and a run under faults passes it."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from slipstream.client.chaos.oracle import examine
from slipstream.client.chaos.run_chaos import Chaos, Proxy, run_chaos
from slipstream.client.run_folder import write_config
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.learner.controller.records.journal import batch_path, encoded
from slipstream.v1 import trainer_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.run_processes import ROOT
from support.rigs.run_processes import write_config as write_run

STEPS = 6
Records = list[dict]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing harmed."""
    config = make_config(tmp_path_factory.mktemp("run"), run__steps=STEPS)
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    summary = asyncio.run(play(config, server, trainer=trainer))
    assert summary["state"] == "finished"
    write_config(config, config.run_dir)
    return config.run_dir


class Planted:
    """A copy of a run, in which somebody changes records and batches."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.folder = Path(shutil.copytree(run, folder / "r"))
        self.log = self.folder / "journal" / "journal.log"
        self.records = [json.loads(line[9:]) for line in self.log.read_bytes().splitlines()]
        for record in self.records:
            del record["line"]

    def one(self, kind: str, step: int = 2) -> dict:
        return next(r for r in self.records if r["kind"] == kind and r["step"] == step)

    def change_batch(self, step: int, change: Callable[[trainer_pb2.RecordedBatch], None]) -> None:
        """Changes a batch and its record, as a controller with a bug would have written both."""
        path = batch_path(self.log.parent, step)
        batch = trainer_pb2.RecordedBatch.FromString(path.read_bytes())
        change(batch)
        data = batch.SerializeToString(deterministic=True)
        path.write_bytes(data)
        self.one("batch", step)["crc32"] = zlib.crc32(data)

    def examine(self):
        lines = [encoded(number, record) for number, record in enumerate(self.records, start=1)]
        self.log.write_bytes(b"".join(lines))
        return examine(self.folder)


@pytest.fixture
def planted(whole_run: Path, tmp_path: Path) -> Planted:
    return Planted(whole_run, tmp_path)


def test_the_oracle_finds_nothing_in_a_whole_run(planted: Planted) -> None:
    found = planted.examine()
    assert found.all == []
    assert 1 <= found.max_lag <= 2


def test_the_oracle_finds_a_trajectory_that_is_trained_twice(planted: Planted) -> None:
    path = batch_path(planted.log.parent, 1)
    first = trainer_pb2.RecordedBatch.FromString(path.read_bytes()).trajectories[0]
    planted.change_batch(2, lambda batch: batch.trajectories[0].CopyFrom(first))
    assert any("was trained before" in text for text in planted.examine().duplicated)


def test_the_oracle_finds_a_trajectory_that_ended_and_is_trained(planted: Planted) -> None:
    path = batch_path(planted.log.parent, 1)
    each = trainer_pb2.RecordedBatch.FromString(path.read_bytes()).trajectories[0]
    name = f"{each.group_id}.{each.member}.{each.attempt}.{each.server_epoch:x}"
    planted.records.insert(-1, {"kind": "end", "id": name, "end": "cancelled"})
    assert any("ended as cancelled" in text for text in planted.examine().duplicated)


def test_the_oracle_finds_an_end_that_is_there_twice(planted: Planted) -> None:
    planted.records += [{"kind": "end", "id": "g9.0.0.1", "end": "failed"}] * 2
    assert len(planted.examine().duplicated) == 1


def test_the_oracle_finds_a_lost_member(planted: Planted) -> None:
    def lose(batch: trainer_pb2.RecordedBatch) -> None:
        del batch.trajectories[3]

    planted.change_batch(2, lose)
    assert any("3 of 4 members" in text for text in planted.examine().lost)


def test_the_oracle_finds_a_group_that_nobody_ended(planted: Planted) -> None:
    lease = dict(next(r for r in planted.records if r["kind"] == "lease"))
    numbers = [int(r["group"][1:]) for r in planted.records if r["kind"] == "lease"]
    lease |= {"group": f"g{max(numbers) + 1:06d}", "deadline": 1}
    planted.records.append(lease)
    (text,) = planted.examine().lost
    assert "was to be trained by step 1" in text


def test_the_oracle_finds_a_step_without_its_batch(planted: Planted) -> None:
    planted.records.remove(planted.one("batch"))
    assert planted.examine().lost
    batch_path(planted.log.parent, 3).unlink()
    assert any("is not there" in text for text in planted.examine().lost)


def test_the_oracle_finds_a_token_that_is_too_old(planted: Planted) -> None:
    def age(batch: trainer_pb2.RecordedBatch) -> None:
        batch.trajectories[0].version_spans[0].version.step = 1

    planted.change_batch(4, age)
    found = planted.examine()
    assert (found.max_lag, len(found.stale)) == (3, 1)


def test_the_oracle_finds_tokens_of_a_version_that_nobody_made(planted: Planted) -> None:
    def invent(batch: trainer_pb2.RecordedBatch) -> None:
        batch.trajectories[0].version_spans[0].version.incarnation = 3

    planted.change_batch(4, invent)
    assert any("no step made its version" in text for text in planted.examine().torn)


def test_the_oracle_finds_a_flipped_bit_and_knows_a_torn_end(planted: Planted) -> None:
    data = planted.log.read_bytes()
    planted.log.write_bytes(data + data[:20])
    assert examine(planted.folder).all == []
    planted.log.write_bytes(data.replace(b'"kind":"step"', b'"kind":"stop"', 1))
    assert any("is damaged" in text for text in examine(planted.folder).torn)


def test_the_oracle_finds_a_batch_that_is_not_the_recorded_one(planted: Planted) -> None:
    planted.one("batch")["crc32"] += 1
    assert len(planted.examine().torn) == 1


def test_the_oracle_finds_books_that_do_not_agree(planted: Planted) -> None:
    path = planted.folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["ledger"]["difference"] = 5
    path.write_text(json.dumps(summary))
    assert planted.examine().unequal == ["the ledger's difference: 5 and 0"]


async def test_a_proxy_delays_hangs_and_breaks_connections() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    echoing = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with echoing, Proxy(echoing.sockets[0].getsockname()[:2]) as proxy:
        host, port = proxy.address.split(":")

        async def connect():
            return await asyncio.open_connection(host, int(port))

        async def answer(reader, writer) -> bytes:
            writer.write(b"x")
            with contextlib.suppress(ConnectionError):
                return await reader.read(1)
            return b""

        assert not await proxy.cut(0.0)
        one = await connect()
        assert await answer(*one) == b"x"
        slow = asyncio.ensure_future(proxy.delay(0.5, late_s=0.1))
        assert await answer(*one) == b"x"
        assert await slow
        hanging = asyncio.ensure_future(proxy.half_open(0.3))
        await asyncio.sleep(0)
        assert await answer(*one) == b""
        assert await hanging
        two = await connect()
        assert await answer(*two) == b"x"
        cutting = asyncio.ensure_future(proxy.cut(0.3))
        await asyncio.sleep(0)
        assert await answer(*two) == b""
        assert await cutting
        three = await connect()
        assert await answer(*three) == b"x"


STEPPING = """
import json, signal, sys, time, zlib
from pathlib import Path

signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
journal = Path({folder!r})
journal.mkdir(parents=True, exist_ok=True)
while True:
    with (journal / "journal.log").open("a") as log:
        log.write(f'{{0:08x}} {{json.dumps({{"kind": "step"}})}}\\n')
    time.sleep(0.1)
"""


async def test_each_step_has_its_own_time_also_while_no_fault_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.client.chaos.run_chaos.POINTS", ("any",))
    config = make_config(tmp_path)
    program = tmp_path / "stepping.py"
    program.write_text(STEPPING.format(folder=str(config.run_dir / "journal")))
    chaos = Chaos(config, [sys.executable, str(program)], [], random.Random(1))
    async with asyncio.timeout(60):
        assert await chaos.run(2, 1.0, ["command"], partitions=False) == 0
    assert len(set(chaos.tally.steps_s)) > len(chaos.tally.steps_s) / 2
    assert chaos.tally.effective_time > 0


async def test_a_run_that_is_refused_says_why(tmp_path, tiny_model) -> None:
    path = write_run(tmp_path, tiny_model)
    refused = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(2)"]
    with pytest.raises(RunFailed, match="the run did not begin: no such model"):
        await run_chaos(
            path, [], kills=1, seed=0, every_s=1.0, roles="", partitions=False, command=refused
        )


async def test_a_cut_off_server_needs_a_queue_that_it_can_use(tmp_path, tiny_model) -> None:
    path = write_run(tmp_path, tiny_model, queue__kind="redis")
    with pytest.raises(ConfigError, match="--partitions with queue.kind = 'redis' needs queue.re"):
        await run_chaos(path, [], kills=1, seed=0, every_s=1.0, roles="", partitions=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("queue", ["grpc", "redis"])
def test_a_run_under_faults_loses_and_doubles_nothing(tmp_path: Path, tiny_model: Path, queue: str):
    path = write_run(tmp_path, tiny_model, run__steps=100_000, evaluations=[], queue__kind=queue)
    command = [sys.executable, "-m", "support.fakes.quick_run", "chaos", str(path)]
    # One more server cannot use the queue that the command starts.
    partitions = ["--partitions"] if queue == "grpc" else []
    chaos = subprocess.run(
        [*command, "--kills=12", "--seed=3", "--every-s=0.5", *partitions],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        check=False,
    )
    told = json.loads(chaos.stdout)
    assert chaos.returncode == 0, told
    assert (told["fired"], told["found"], told["replay_equal"]) == (12, [], True)
