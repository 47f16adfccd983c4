"""A trajectory is lost or doubled once at each hand-over; the ledger names the hand-over."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.settings.config import Config
from slipstream.core.types import Failure, ServerId
from slipstream.learner.controller import application
from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.journal import Journal, JournalReader
from slipstream.learner.controller.records.snapshots import open_history
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.intake import Intake
from slipstream.protocol.queue.base import Tally
from slipstream.rollout_server.engine_interface import EngineUse
from slipstream.rollout_server.usage import EpochCounters
from slipstream.v1 import trainer_pb2
from support.fakes.fake_server import FakeServer, environment_failure
from support.fakes.fake_trainer import START, FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.valkey import EmbeddedServer
from support.rigs.waiting import until

TOKENS = 5
STEPS = 4
LIMIT_S = 60.0
# The ledger's account of the third trajectory, by how often it is passed on.
FAULTS = {
    number: f"1 trajectory with {TOKENS} tokens {fault}"
    for number, fault in {0: "lost", 2: "twice"}.items()
}
USERS = {"administrator": "~* &* +@all"}

times = pytest.mark.parametrize("times", FAULTS, ids=["lost", "twice"])
queues = pytest.mark.parametrize("queue", ["grpc", "redis"])


class Third:
    """Passes each call on once, and the third one `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(range(self.times if self.calls == 3 else 1))

    @property
    def fired(self) -> bool:
        return self.calls >= 3


class FaultySender:
    """A sender of the product behind a hand-over that fails once."""

    def __init__(self, sender: Any, third: Third, *, inside: bool) -> None:
        """With `inside` the sender itself fails: it counts what it does not send."""
        self._sender = sender
        self._third = third
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    async def put(self, name, data, *, timeout_s: float, tokens: int) -> None:
        rounds = list(self._third)
        if self._inside and not rounds:
            # Not while a transaction of Redis runs, which would write its own count over this one.
            async with getattr(self._sender, "_executing", contextlib.nullcontext()):
                self._sender._sent.add(name, tokens)
            self._sender.taken.add(name, tokens)
        for _ in rounds:
            await self._sender.put(name, data, timeout_s=timeout_s, tokens=tokens)


class FaultyServer(FakeServer):
    """A server whose sender is a `FaultySender`."""

    def __init__(
        self, address: str, third: Third, *, inside: bool = False, **options: Any
    ) -> None:
        super().__init__(address, "faulty", **options)
        self._wrap = lambda sender: FaultySender(sender, third, inside=inside)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name, self._wrap(value) if name == "sender" and value else value
        )


class FaultyReceiver:
    """A receiver of the product whose deliveries are lost or come twice on their way."""

    def __init__(self, receiver: Any, third: Third) -> None:
        self._receiver = receiver
        self._third = third
        self._again = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    async def get(self):
        while not self._again:
            delivery = await self._receiver.get()
            self._again += [delivery for _ in self._third]
        return self._again.pop()


@contextlib.asynccontextmanager
async def queue_of(
    kind: str, folder: Path
) -> AsyncIterator[tuple[dict[str, str], str]]:
    """The settings of a queue, and its URL."""
    if kind == "grpc":
        yield {}, ""
        return
    async with EmbeddedServer(folder / "valkey", USERS) as server:
        url = server.url("administrator")
        yield {"queue__kind": "redis", "queue__redis_url": url}, url


def settings(folder: Path, **changes: object) -> Config:
    sizes = {
        "algorithm__group_size": 2,
        "algorithm__groups_per_step": 2,
        "run__steps": STEPS,
    }
    return make_config(folder, **{**sizes, **changes})


def is_told(
    summary: dict, caplog: pytest.LogCaptureFixture, place: str, times: int
) -> bool:
    """Whether summary and events name the hand-over, and what became of the trajectory."""
    events = [record.getMessage() for record in caplog.records]
    return any(
        line.startswith(place)
        and line.endswith(FAULTS[times])
        and f"the ledger is open, {line}" in events
        for line in summary["ledger"]["gaps"]
    )


async def planted(
    config: Config, *servers: FakeServer, third: Third, kills: bool = False
) -> dict:
    """The summary of a run that is stopped when its ledger is open, or goes on after a kill."""

    async def until_told(controller: Controller, tasks: list) -> None:
        await until(lambda: third.fired, LIMIT_S)
        await until(lambda: controller.books.ledger.snapshot().gaps, LIMIT_S)
        if kills:
            servers[0].killed = True
            tasks[0].cancel()
        else:
            controller.stop("its ledger is open")

    trainer = FakeTrainer(config.controller.address)
    return await play(
        config, *servers, trainer=trainer, during=until_told, is_planted=True
    )


@times
def test_between_engine_and_record(times: int) -> None:
    """The record of a server has the tokens of its engine's third reply, or not, or twice."""
    start = EngineUse(
        generated_tokens=0, returned_tokens=0, open_requests=0, busy_s=0.0
    )
    counters = EpochCounters(start)
    third = Third(times)
    counters.open_episodes += 1
    for _ in range(4):
        for _ in third:
            counters.sampled(TOKENS)
    counters.ended(counters.recorded_tokens)
    made = replace(start, generated_tokens=4 * TOKENS, returned_tokens=4 * TOKENS)
    key = ServerKey(ServerId("faulty"), 7)
    epochs = ServerEpochs()
    report = counters.report(made, sent=Tally(), queued_bytes=0)
    epochs.join(key).report(report)
    (gap,) = [gap for name, _, gap in epochs.gaps() if name == "engine to record"]
    assert gap == Tally(0, TOKENS if times == 0 else -TOKENS)


@times
@queues
async def test_between_record_and_queue(
    tmp_path, caplog, queue: str, times: int
) -> None:
    async with queue_of(queue, tmp_path) as (changes, url):
        config = settings(tmp_path, **changes)
        third = Third(times)
        server = FaultyServer(config.controller.address, third, queue_url=url)
        summary = await planted(config, server, third=third)
    assert is_told(
        summary, caplog, f"record to queue of faulty, epoch {server.epoch:x}", times
    )


@queues
async def test_inside_the_queue_of_a_server_that_dies(
    tmp_path, caplog, queue: str
) -> None:
    async with queue_of(queue, tmp_path) as (changes, url):
        config = settings(tmp_path, **changes)
        third = Third(0)
        address = config.controller.address
        server = FaultyServer(
            address, third, inside=True, queue_url=url, max_episodes=8
        )
        other = FakeServer(address, "other", queue_url=url, max_episodes=8)
        summary = await planted(config, server, other, third=third, kills=True)
    assert is_told(
        summary, caplog, f"queue to intake of faulty, epoch {server.epoch:x}", 0
    )
    # The other server made what this one owed.
    assert (summary["code"], summary["steps"]) == (0, STEPS)


@times
@queues
async def test_between_queue_and_intake(tmp_path, caplog, monkeypatch, queue, times):
    third = Third(times)
    opened = application.open_receiver

    async def open_faulty(*given):
        return FaultyReceiver(await opened(*given), third)

    monkeypatch.setattr(application, "open_receiver", open_faulty)
    async with queue_of(queue, tmp_path) as (changes, url):
        config = settings(tmp_path, **changes)
        server = FakeServer(config.controller.address, queue_url=url)
        summary = await planted(config, server, third=third)
    assert is_told(summary, caplog, "queue to intake", times)


@times
async def test_between_intake_and_batch(tmp_path, caplog, monkeypatch, times):
    third = Third(times)
    file = Intake._file

    def file_faultily(intake, trajectory) -> None:
        for _ in third:
            file(intake, trajectory)

    monkeypatch.setattr(Intake, "_file", file_faultily)
    config = settings(tmp_path)
    summary = await planted(config, FakeServer(config.controller.address), third=third)
    assert is_told(summary, caplog, "intake to batch", times)


@times
@pytest.mark.parametrize("kind", ["batch", "end"])
async def test_between_batch_and_journal(tmp_path, caplog, monkeypatch, kind, times):
    third = Third(times)
    write = Journal.write_batch
    append = Journal.append

    def write_faultily(journal, batch) -> kinds.StepBatch:
        changed = trainer_pb2.RecordedBatch(header=batch.header)
        for trajectory in batch.trajectories:
            changed.trajectories.extend(trajectory for _ in third)
        return write(journal, changed)

    def append_faultily(journal, record) -> None:
        for _ in third if isinstance(record, kinds.End) else [1]:
            append(journal, record)

    if kind == "batch":
        monkeypatch.setattr(Journal, "write_batch", write_faultily)
    else:
        monkeypatch.setattr(Journal, "append", append_faultily)
    config = settings(tmp_path, controller__max_attempts=9)
    server = FakeServer(config.controller.address, judge=fails_at_first)
    summary = await planted(config, server, third=third)
    assert is_told(summary, caplog, "batch to journal", times)


def fails_at_first(lease, member: int, attempt: int) -> float | Failure:
    return (
        environment_failure(lease, member, attempt) if attempt == 0 else float(member)
    )


@times
async def test_between_journal_and_restart(tmp_path, caplog, monkeypatch, times):
    config = settings(tmp_path, controller__max_attempts=9)
    trainer = FakeTrainer(config.controller.address, checkpoint_every=1)
    trainer.hold_at(2)

    async def stop(controller: Controller, tasks: list) -> None:
        await trainer.until_held()
        controller.stop("enough")
        trainer.gate.set()

    server = FakeServer(config.controller.address, judge=fails_at_first)
    await play(config, server, trainer=trainer, during=stop)
    third = Third(times)

    class FaultyReader:
        """Loses or doubles the third end of a reader of the journal."""

        def __init__(self, reader: JournalReader) -> None:
            self._reader = reader
            self.line = reader.line

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for record in self._reader:
                yield from (record for _ in (third if record["kind"] == "end" else [1]))

    def open_faultily(
        folder: Path, warn: Callable[[str], None]
    ) -> tuple[Any, FaultyReader]:
        history, reader = open_history(folder, warn)
        return history, FaultyReader(reader)

    again = settings(tmp_path, controller__max_attempts=9)
    trainer = FakeTrainer(
        again.controller.address, checkpoint=trainer.newest_checkpoint
    )
    with monkeypatch.context() as patched:
        patched.setattr(application, "open_history", open_faultily)
        server = FakeServer(again.controller.address, judge=fails_at_first)
        summary = await play(again, server, trainer=trainer, is_planted=True)
    assert (summary["code"], summary["steps"]) == (0, STEPS)
    assert is_told(summary, caplog, "journal to restart", times)


@queues
async def test_without_a_fault_no_ledger_is_open(tmp_path, queue: str) -> None:
    """A server dies, the controller is stopped, and all goes on."""
    async with queue_of(queue, tmp_path) as (changes, url):
        config = settings(tmp_path, run__steps=8, controller__max_attempts=9, **changes)
        address = config.controller.address
        checkpoint = START
        for stop_at in (3, 0):
            trainer = FakeTrainer(address, checkpoint=checkpoint, checkpoint_every=1)
            if stop_at:
                trainer.hold_at(stop_at)
            fleet = [
                FakeServer(address, f"s{number}", judge=fails_at_first, queue_url=url)
                for number in range(2)
            ]

            async def kill_and_stop(
                controller, tasks, trainer=trainer, fleet=fleet
            ) -> None:
                await until(lambda: len(fleet[0].delivered) > 5, LIMIT_S)
                fleet[0].killed = True
                tasks[0].cancel()
                if trainer.gated_from:
                    await trainer.until_held()
                    controller.stop("enough")
                    trainer.gate.set()

            summary = await play(config, *fleet, trainer=trainer, during=kill_and_stop)
            checkpoint = trainer.newest_checkpoint
    assert (summary["code"], summary["steps"]) == (0, 8)
