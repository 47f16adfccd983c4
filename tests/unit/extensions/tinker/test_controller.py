"""Steps of a client's loop, when kills come between the journal and the results on the disk."""

import asyncio
import contextlib
import itertools
import math
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import PolicyVersion, ServerId, Status, VersionSpan
from slipstream.extensions.tinker import models, operation_results, service
from slipstream.extensions.tinker.controller import Operations
from slipstream.extensions.tinker.models import Entry, Named
from slipstream.extensions.tinker.operation_results import MIN_KEPT
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.records.recorded_steps import RecordedBatch
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.formed_batch import (
    FormedBatch,
    SetAside,
)
from slipstream.v1 import fleet_pb2, trainer_pb2
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1.operations_pb2 import Operation
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S, until

ADAM = trainer_pb2.AdamNumbers(learning_rate=0.1)
STEPS = ["step1", "step2", "step3"]
TWO = {"rank": 8, "publish": "adapters", "adapters": ["a", "b"]}
ASKS = trainer_pb2.NextRequest()


class Refused(Exception):
    """A call was refused."""


class Refusing:
    """The context of a call, which may be refused."""

    async def abort(self, code: object, text: str, metadata: object) -> None:
        raise Refused(text)


def of(name: str, number: int = 0, stream: str = "s", **operation: Any) -> Operation:
    """An operation, which is a step of Adam unless it is said to be something else."""
    return Operation(
        id=name, stream=stream, number=number, **(operation or {"step": ADAM})
    )


def begin(stream: str = "s", rank: int = 1) -> Operation:
    adapter = trainer_pb2.Adapter(rank=rank, alpha=1.0)
    return of(f"{stream}:begin", 0, stream, begin=pb.Begin(adapter=adapter))


def passed(
    name: str, number: int, stream: str = "s", data: bytes = b"", backward: bool = True
):
    sequences = [trainer_pb2.PassSequence(token_ids=data)] if data else []
    compute = trainer_pb2.Pass(id=name, backward=backward, sequences=sequences)
    return of(name, number, stream, compute=compute)


def refused(name: str, number: int, stream: str = "s") -> Operation:
    return of(name, number, stream, refused=pb.Refused(cause="no"))


class Loop:
    """The operations of one start of a controller, whose trainer makes each step at once."""

    def __init__(self, journal: Journal, folder: Path, **settings: dict) -> None:
        self.context: Any = Refusing()
        self.run = run_of(run={"name": "r", "steps": 9, "dir": str(folder)}, **settings)
        self.history = read_history(read_records(folder / "r" / "journal"))
        self.run.progress.reached(self.history.version)
        self.journal = journal
        unused: Any = None
        tasks: Any = asyncio
        books = books_of(self.run, journal=journal, state=self.history)
        self.former = BatchFormer(books, tasks)
        self.operations = Operations(
            self.run, books, unused, unused, unused, self.former
        )
        self.operations.restore(self.history)
        self.entries = self.operations._entries
        self.models = self.operations._models
        self.samples: Any = self.operations._samples

    async def give(self, *operations: Operation) -> None:
        for operation in operations:
            await self.operations.service.Submit(operation, self.context)

    async def begin(self, *operations: Operation) -> None:
        """Gives these operations, or three steps, behind the beginning, which is over then."""
        steps = [of(name, number) for number, name in enumerate(STEPS, 1)]
        await self.give(begin(), *(operations or steps))
        self.operations._look()

    async def begun(self, *operations: Operation) -> None:
        await self.begin(*operations)
        await self.write_results()

    def computes(self, name: str, **result: Any) -> None:
        """Lets the trainer compute the pass whose turn it is."""
        self.operations._look()
        self.operations.computed(trainer_pb2.PassReport(id=name, **result))

    async def write_results(self) -> None:
        """Lets all that is to be written reach the disk."""
        written = asyncio.create_task(self.operations._results.write())
        last = self.entries["last"] = Entry(Operation(id="last"))
        self.operations._results.queue.put_nowait(last)
        await asyncio.wait_for(last.ended.wait(), LIMIT_S)
        written.cancel()
        del self.entries["last"]

    async def result(self, name: str) -> pb.OperationResult:
        await_request = pb.AwaitRequest(id=name, limit_s=LIMIT_S)
        return await self.operations.service.Await(await_request, self.context)

    def form(self) -> FormedBatch | None:
        """Journals the batch of the step whose turn it is; None if there is no such step."""
        self.operations._look()
        before = self.operations._before
        if before is not None and not before.ended.is_set():
            # The journal waits for it.
            return None
        order = self.operations.next_step()
        if order is None:
            return None
        step = self.history.next_step
        batch = FormedBatch(step, f"b{step:06d}", (), order)
        self.journal.append(self.journal.write_batch(batch.contents))
        return batch

    def formed(self) -> FormedBatch:
        """Journals the batch of the step whose turn it is, which is there."""
        batch = self.form()
        assert batch is not None
        return batch

    def step(self) -> str:
        """Makes the step whose turn it is, up to its record; returns its id, or ""."""
        batch = self.form()
        return "" if batch is None else self.made(batch)

    async def makes(self, *names: str) -> None:
        """Makes these steps, which are those whose turn it is, up to their results."""
        for name in names:
            assert self.step() == name
            await self.write_results()

    def made(self, batch: FormedBatch, **metrics: float) -> str:
        """Journals and reports the step of a batch; returns its id."""
        report = trainer_pb2.StepReport(
            step=batch.step, batch_id=batch.batch_id, metrics=metrics
        )
        report.version.step = batch.version
        self.former.training = batch
        trained = self.former.trained(report)
        self.run.progress.reached(trained.version)
        self.operations.stepped(trained, report, None)
        return batch.given.id


@contextlib.contextmanager
def opened(folder: Path, **settings: dict) -> Iterator[Loop]:
    """A start of a controller; the first one begins the journal."""
    with Journal(folder / "r" / "journal") as journal:
        if not any(read_records(folder / "r" / "journal")):
            journal.append(kinds.Start(format=1, run_id="r"))
            journal.sync()
        yield Loop(journal, folder, **settings)


@contextlib.asynccontextmanager
async def writing(folder: Path) -> AsyncIterator[Loop]:
    """A start that writes results beside the test."""
    with opened(folder) as loop:
        writes = asyncio.create_task(loop.operations._results.write())
        yield loop
        writes.cancel()


async def test_the_journal_has_a_step_when_the_result_before_it_is_on_the_disk(
    tmp_path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        loop.operations._look()
        journal = tmp_path / "r" / "journal"
        forming = asyncio.create_task(loop.former.form(loop.operations.next_step()))
        # The file of its passes is written meanwhile.
        await until(lambda: list((journal / "batches").iterdir()))
        await asyncio.sleep(0)
        loop.journal.sync()
        assert [record["kind"] for record in read_records(journal)] == ["start"]
        await loop.write_results()
        assert await forming is not None
        assert [record["kind"] for record in read_records(journal)] == [
            "start",
            "batch",
        ]


@pytest.mark.parametrize("error", ["", "the loss is inf"])
async def test_the_passes_of_a_step_are_written_while_the_last_one_is_computed(
    tmp_path, error
):
    with opened(tmp_path) as loop:
        passes = [
            passed(name, n, data=bytes(4))
            for n, name in enumerate(("first", "last"), 1)
        ]
        await loop.begin(*passes, of("step", 3))
        operations = loop.operations
        # A trainer that wakes before the loop of the operations has the pass whose turn it is.
        directive = operations.order(ASKS)
        assert isinstance(directive, bytes)
        assert trainer_pb2.Directive.FromString(directive).compute.id == "first"
        operations.computed(trainer_pb2.PassReport(id="first"))
        folder = tmp_path / "r" / "journal" / "batches"
        assert not list(folder.iterdir())
        assert operations.order(ASKS) is not None
        await until(lambda: list(folder.iterdir()))
        (path,) = folder.iterdir()
        (tmp_path / "ahead").hardlink_to(path)
        operations.computed(trainer_pb2.PassReport(id="last", error=error))
        await loop.write_results()
        assert operations.order(ASKS) is None
        batch = await loop.former.form(operations.next_step())
        assert batch is not None
        # A step without the pass that failed has a file of its own.
        assert path.samefile(tmp_path / "ahead") is not bool(error)
        record: Any = list(read_records(folder.parent))[-1]
        contents = loop.journal.read_batch(
            RecordedBatch(0, record["batch_id"], record["crc32"])
        )
        assert [client_pass.id for client_pass in contents.passes] == (
            ["first"] if error else ["first", "last"]
        )


async def test_an_operation_whose_turn_has_come_wakes_the_trainer(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        trainer = asyncio.create_task(loop.run.signal.changes(LIMIT_S, gather_s=0.0))
        await asyncio.sleep(0)
        loop.operations._take_turn()
        await asyncio.sleep(0)
        assert trainer.done()


async def test_a_step_whose_result_a_kill_has_lost_is_made_once_and_told_whole(
    tmp_path,
) -> None:
    metrics = {"loss": 0.1, "grad_norm": math.inf, "kl": math.nan}
    expected_results = {}
    for start in range(4):
        with opened(tmp_path) as loop:
            if start == 0:
                await loop.begin()
            await loop.write_results()
            for name, expected in expected_results.items():
                answer = await loop.result(name)
                assert (answer.step, answer.metrics["loss"]) == (int(name[-1]), 0.1)
                assert answer.SerializeToString(deterministic=True) == expected
            if batch := loop.form():
                name = loop.made(batch, **metrics)
                expected_results[name] = loop.entries[name].result.SerializeToString(
                    deterministic=True
                )
            loop.journal.sync()
            # The controller is killed before the result is written.
    assert list(expected_results) == STEPS


async def test_a_step_that_a_user_sets_aside_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begun()
        loop.journal.append(SetAside.of(loop.formed(), (), "x", by="user").record())
    with opened(tmp_path) as loop:
        await loop.write_results()
        assert (await loop.result("step1")).error == "batch b000000 was set aside"
        assert loop.step() == "step2"


async def test_an_operation_at_which_two_trainers_ended_is_refused_in_its_turn(
    tmp_path, caplog
):
    def ordered(loop: Loop) -> bool:
        return loop.operations.order(ASKS) is not None

    with opened(tmp_path) as loop:
        await loop.begun(passed("bad", 1, data=b"1234"), of("step", 2))
        loop.operations._look()
        # A trainer that had not asked for it did not end for its sake.
        await loop.operations.trainer_ended()
        assert ordered(loop)
        await loop.operations.trainer_ended()
        await loop.operations.trainer_ended()
        assert loop.entries["bad"].operation.trainer_ends == 1
    # The count outlives the run's start; the second end is that of the operation.
    with opened(tmp_path) as loop:
        assert ordered(loop)
        await loop.operations.trainer_ended()
        await loop.write_results()
        cause = (await loop.result("bad")).error
        assert cause.startswith(
            "bad is refused: 2 trainers have ended while they carried it out"
        )
        await loop.makes("step")
        assert cause in caplog.text


async def test_a_long_loop_keeps_neither_sequences_nor_results_in_memory(
    tmp_path: Path,
) -> None:
    data = b"1234" * 1000
    names = ("forward", "backward")

    async def check(loop: Loop) -> None:
        sizes = (
            e.operation.ByteSize() + e.result.ByteSize() for e in loop.entries.values()
        )
        assert max(sizes) < 100
        for name in names:
            assert (await loop.result(name)).compute.logprobs[0] == data

    with opened(tmp_path) as loop:
        passes = [
            passed(stream, n, data=data, backward=n == 2)
            for n, stream in enumerate(names, 1)
        ]
        await loop.begin(*passes, of("step", 3))
        for name in names:
            loop.computes(name, logprobs=[data])
        await loop.write_results()
        batch = loop.formed()
        assert [
            client_pass.sequences[0].token_ids for client_pass in batch.given.passes
        ] == [data]
        loop.made(batch)
        await loop.write_results()
        await check(loop)
    with opened(tmp_path) as loop:
        await check(loop)


async def test_streams_have_turns_however_much_one_of_them_sends(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(begin("s", 1), begin("t", 8))
        await loop.makes("s:begin", "t:begin")
        for stream, num_operations in (("s", 4), ("t", 2)):
            await loop.give(
                *(
                    passed(f"{stream}{n}", n, stream)
                    for n in range(1, num_operations + 1)
                )
            )
        order = []
        for _ in range(6):
            found = loop.operations.order(ASKS)
            assert isinstance(found, bytes)
            directive = trainer_pb2.Directive.FromString(found)
            order.append((directive.compute.id, directive.compute.adapter.name))
            loop.computes(directive.compute.id)
        names = [
            ("s1", "a"),
            ("t1", "b"),
            ("s2", "a"),
            ("t2", "b"),
            ("s3", "a"),
            ("s4", "a"),
        ]
        assert order == names


async def test_models_are_taken_over_whatever_the_order_in_which_operations_came(
    tmp_path,
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(begin("t", 8), begin("s"), of("step2", 2), of("step1", 1))
        await loop.makes("t:begin", "s:begin", "step1", "step2")
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(of("step3", 3))
        order = loop.formed().given
        assert (order.id, order.message.adapter.name) == ("step3", "b")


async def test_a_beginning_that_a_kill_has_cut_has_its_place_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(begin("s"), begin("t"))
        assert loop.form() is not None
    with opened(tmp_path, lora=TWO) as loop:
        loop.operations._look()
        # The trainer has the batch of the first.
        assert loop.operations.next_step() is None
        assert [model.adapter.name for model in loop.models.by_stream.values()] == ["a"]
        assert "s" in loop.models.by_stream


async def test_a_session_that_sends_too_much_must_wait_and_no_other(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(service, "MAX_WAITING", 2)
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(begin("s"), begin("t"), of("1", 1), of("2", 2))
        with pytest.raises(Refused, match="2 requests of session s wait: "):
            await loop.give(of("3", 3))
        # A pass that is sent again is known.
        await loop.give(of("t1", 1, "t"), of("2", 2))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, where thousands of writes need not reach a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Client:
    """A client's loop of passes with a step after nine of them, each told as soon as it ends."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.number = 0

    async def order(self, **operation: Any) -> pb.OperationResult:
        """Carries an operation, or a pass, out, its trainer's part too, and returns its result."""
        loop = self.loop
        name = f"s:{self.number}"
        number = self.number
        self.number += 1
        data = bytes(400)
        operation_of_stream = (
            of(name, number, **operation)
            if operation
            else passed(name, number, data=data)
        )
        await loop.give(operation_of_stream)
        loop.operations._look()
        if operation_of_stream.HasField("compute"):
            loop.computes(name, logprobs=[data])
        elif operation_of_stream.HasField("step"):
            await until(lambda: loop.operations._before.ended.is_set())
            order = loop.operations.next_step()
            version = loop.run.progress.version.step + 1
            batch = SimpleNamespace(given=order)
            version_made = PolicyVersion(0, version)
            loop.run.progress.reached(version_made)
            trained: Any = SimpleNamespace(batch=batch, version=version_made)
            loop.operations.stepped(trained, trainer_pb2.StepReport(), None)
        return await loop.result(name)


@pytest.mark.long
async def test_ten_thousand_operations_leave_few_on_the_disk_and_in_memory(
    in_memory: Path,
) -> None:
    num_operations = 2 * MIN_KEPT + 16
    files = in_memory / "r" / "operations"
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=pb.Begin())
        while client.number < 10_000:
            for _ in range(9):
                await client.order()
            assert not (await client.order(step=ADAM)).error
            # A checkpoint every ten steps covers what was before it.
            covered = loop.run.progress.version.step // 10 * 10
            loop.history.checkpoint = loop.history.checkpoint._replace(step=covered)
            assert len(loop.entries) <= num_operations
        assert len(list(files.iterdir())) <= 2 * num_operations
        assert not any([(await client.order()).error for _ in range(2)])
    async with writing(in_memory) as loop:
        # The client goes on behind the newest one, with the passes that no step has yet.
        client.loop, (model,) = loop, loop.models.by_stream.values()
        assert (model.next, len(model.passes)) == (client.number, 2)
        assert not (await client.order()).error
        client.number = 5
        gone = "s:5 was carried out; its result is not kept any more"
        assert (await client.order()).error == gone


@pytest.mark.long
async def test_what_went_with_the_step_of_very_many_passes_is_not_written_again(
    in_memory,
) -> None:
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=pb.Begin())
        while client.number < 3 * MIN_KEPT - 1:
            await client.order()
        # The operations are looked through when the step has ended.
        assert not (await client.order(step=ADAM)).error
        await until(loop.operations._results.queue.empty)
        await client.order(refused=pb.Refused(cause="no"))
        files = list((in_memory / "r" / "operations").glob("[0-9]*"))
        assert len(files) < 3 * MIN_KEPT
        assert all(path.with_suffix(".result").exists() for path in files)


async def test_operations_stay_as_long_as_their_names_are_known(
    in_memory, monkeypatch
) -> None:
    monkeypatch.setattr(operation_results, "MIN_KEPT", 4)
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=pb.Begin())
        await client.order(save=pb.Save(name="start"))
        for _ in range(8):
            await client.order(refused=pb.Refused(cause="no"))
        assert {"s:0", "s:1"} <= loop.entries.keys()
        assert "s:2" not in loop.entries
        assert "start" in Loop(loop.journal, in_memory).models.named


async def test_the_step_behind_a_publish_waits_for_a_server_of_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begun()
        publish = Entry(Operation(publish=pb.Publish(name="x")))
        loop.models.named["x"] = Named(0, entry=publish)
        # Servers that join after a restart get the newest version.
        assert loop.form() is None
        loop.operations._fleet = Fleet(0)  # type: ignore[assignment]
        assert loop.operations.next_step() is not None


async def test_a_client_that_died_unsaved_goes_on_from_the_newest_state(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begun(of("step1", 1))
        await loop.makes("step1")
        for stream, path in (("t", "tinker://newest"), ("u", "tinker://t/newest")):
            await loop.give(of(stream, 0, stream, load=pb.Load(name=path)))
            # The trainer is asked for nothing.
            loop.operations._look()
            assert loop.operations.next_step() is None
            await loop.write_results()
            assert (await loop.result(stream)).step == 1
        await loop.give(of("late", 2))
        await loop.write_results()
        assert (
            "is not trained by this run any more" in (await loop.result("late")).error
        )


async def test_a_request_that_a_kill_has_cut_is_none(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        torn = tmp_path / "r" / "operations" / ".000000004.request"
        torn.write_bytes(b"\n")
        assert len(Loop(loop.journal, tmp_path).entries) == 4
        assert not torn.exists()


async def test_a_caller_that_goes_and_comes_again_leaves_one_operation(
    tmp_path, monkeypatch
):
    with opened(tmp_path) as loop:
        await loop.begin()
        store = loop.operations._store
        begins = threading.Event()
        may_write = threading.Event()

        def write(number: int, operation: Operation, write=store.write) -> None:
            begins.set()
            may_write.wait(LIMIT_S)
            write(number, operation)

        monkeypatch.setattr(store, "write", write)
        call = asyncio.create_task(loop.give(of("late", 4)))
        await asyncio.to_thread(begins.wait, LIMIT_S)
        call.cancel()
        again = asyncio.create_task(loop.give(of("late", 4)))
        may_write.set()
        await again
        assert call.cancelled()
        assert [operation.id for _, operation, *_ in store.read()].count("late") == 1


async def test_an_operation_that_begins_no_model_does_not_take_one_over(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begun()
        await loop.give(of("x"))
        await loop.makes(*STEPS)
        loop.operations._look()
        await loop.write_results()
        assert "x has number 0, which is that of a" in (await loop.result("x")).error
        assert loop.models.by_stream["s"].next == 4


async def test_a_model_that_waits_for_its_turn_or_whose_client_beats_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(begin("s"), begin("t"))
        await loop.makes("s:begin", "t:begin")
        await loop.give(of("step1", 1))
        later = itertools.count(models.time.monotonic() + models.IDLE_S + 1)
        monkeypatch.setattr(models.time, "monotonic", lambda: next(later))
        await loop.operations.service.Beat(pb.BeatRequest(session="t"), loop.context)
        await loop.give(begin("u"))
        await loop.makes("step1")
        assert "all 2 places for models" in (await loop.result("u:begin")).error


async def sampled(loop: Loop, names: Sequence[str], told: Sequence[str] = ()) -> Any:
    """The results of samples that a stream, which stays open, has brought."""

    async def asked() -> AsyncIterator[Operation]:
        for name in names:
            yield Operation(id=name, sample=pb.Sample(num_samples=1), told=told)
        await asyncio.Event().wait()

    answers = loop.operations.service.Sample(asked(), loop.context)
    first = asyncio.ensure_future(anext(answers))
    await until(lambda: all(name in loop.entries for name in names))

    async def results() -> AsyncIterator[pb.OperationResult]:
        yield await first
        async for answer in answers:
            yield answer

    return results()


async def test_samples_go_once_told_and_the_oldest_untold_ones_at_last(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(operation_results, "MIN_KEPT", 2)
    names = [str(number) for number in range(40)]
    async with writing(tmp_path) as loop:

        async def sample(
            asked: Sequence[str], told: Sequence[str] = (), under_way: int = 0
        ) -> None:
            """Samples, of which all but the first ones end; then the HTTP process is gone."""
            results = await sampled(loop, asked, told)
            for name in asked[under_way:]:
                loop.samples._over(loop.entries[name])
                await until(loop.entries[name].ended.is_set)
                assert (await anext(results)).id == name
            await results.aclose()

        await sample(names[:7], under_way=1)
        # The streams' clients were not told.
        assert set(names[:7]) == loop.entries.keys()
        await sample(names[7:20])
        await sample(names[20:30], told=names[7:20])
        assert {*names[:7], "28", "29"} <= loop.entries.keys()
        assert not {*names[7:20]} & loop.entries.keys()
        monkeypatch.setattr(operation_results, "MAX_UNTOLD", 3)
        await sample(names[30:])
        # The first is under way; of the others the newest stay.
        assert {"0", *names[36:]} <= loop.entries.keys()
        assert not {*names[1:30]} & loop.entries.keys()
        # A stream that ended late does not go for others that began behind it.
        late = loop.entries["0"]
        late.is_told = True
        loop.samples._over(late)
        await until(late.ended.is_set)
        assert "0" in loop.entries


@pytest.mark.parametrize(
    ("sampling", "is_cut"),
    [
        ({"top_p": 1.0}, False),
        ({"top_p": 1.0, "temperature": 0.5}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 1.0, "top_k": 5}, True),
    ],
)
async def test_replies_from_a_part_of_the_vocabulary_have_no_log_probabilities(
    tmp_path: Path, sampling: dict[str, float], is_cut: bool
) -> None:
    """A loss that compares them with those of the whole would train by a wrong ratio."""
    settings = fleet_pb2.SamplingSettings(**sampling)
    async with writing(tmp_path) as loop:
        entry = Entry(
            Operation(id="s:0", sample=pb.Sample(num_samples=1, sampling=settings))
        )
        reply: Any = SimpleNamespace(
            token_ids=np.array([1, 2, 3], dtype=np.uint32),
            run_lengths=(1, 2),
            behavior_logprobs=np.array([-0.5, -1.0], dtype=np.float32),
            status=Status.COMPLETED,
            prompt_logprobs=b"",
            task_index=0,
        )
        entry.finished.append(reply)
        loop.samples.open[entry] = None
        loop.samples._over(entry)
        assert entry.result is not None
        (sample,) = entry.result.samples
    logprobs = np.frombuffer(sample.logprobs, dtype="<f4")
    assert len(logprobs) == 2
    assert np.isnan(logprobs).all() == is_cut
    assert is_cut or logprobs.tolist() == [-0.5, -1.0]


async def test_a_sample_whose_stream_broke_is_told_to_the_next_one(
    tmp_path: Path,
) -> None:
    async with writing(tmp_path) as loop:
        for _ in range(2):
            samples = await sampled(loop, ["a"])
            if not loop.entries["a"].ended.is_set():
                loop.samples._over(loop.entries["a"])
            assert (await anext(samples)).id == "a"
            await samples.aclose()
        assert (await loop.result("a")).is_done


async def test_the_records_of_samples_that_are_leased_together_are_written_together(
    tmp_path,
):
    sent: list[int] = []
    with opened(tmp_path) as loop:
        samples = await sampled(loop, [str(number) for number in range(20)])
        loop.samples._scheduler = SimpleNamespace(
            free_episodes=100,
            send_evaluation=lambda _, groups: sent.append(len(groups)),
        )
        loop.samples._fleet = Fleet(0)
        loop.samples.lease(None)
        loop.samples.lease(None)
        assert sent == [20]
        await samples.aclose()


async def test_only_samples_go_on_their_stream(tmp_path: Path) -> None:
    async def asked() -> AsyncIterator[Operation]:
        yield of("step")

    with opened(tmp_path) as loop:
        with pytest.raises(ProtocolError, match="step is no sample"):
            await anext(loop.operations.service.Sample(asked(), loop.context))
        with pytest.raises(
            ProtocolError, match="x is a sample, which goes on the stream"
        ):
            await loop.give(of("x", sample=pb.Sample()))


class Serving:
    """A server of a version."""

    def __init__(self, step: int) -> None:
        self.version, self.key = PolicyVersion(0, step), ServerKey(ServerId("s"), 1)
        self.hello = fleet_pb2.ServerHello(max_episodes=100)


class Fleet:
    """A fleet of servers by their versions."""

    def __init__(self, *steps: int) -> None:
        self._sessions = [Serving(step) for step in steps]

    def serving(self) -> list[Serving]:
        return self._sessions


def test_a_session_in_flight_is_not_of_the_model_that_had_its_place_before(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        model = loop.models.take("s", trainer_pb2.Adapter(rank=1, alpha=1.0))
        model.publish(5)
        loop.samples._fleet = Fleet(4, 5, 6)
        sessions, gone = loop.samples._sessions(Named(0, model, in_flight=True))
        assert ([session.version.step for session in sessions], gone) == ([5, 6], "")


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_replies_that_became_too_stale_under_way_are_sampled_anew_or_refused(
    tmp_path: Path, is_pinned: bool
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        model = loop.models.take("s", trainer_pb2.Adapter(rank=1, alpha=1.0))
        model.max_staleness = 2
        model.steps = 5
        model.published = {4: 2, 7: 3}
        loop.models.named["x"] = Named(4, model, in_flight=not is_pinned)
        entry = Entry(Operation(id="s:0", sample=pb.Sample(num_samples=2, name="x")))
        samples = loop.samples
        samples._intake = SimpleNamespace(withdraw=lambda *_: None)
        samples.open[entry] = None
        # The sample of version 6 has the values of the publish before.
        for version in (6, 7):
            span = VersionSpan(1, PolicyVersion(0, version))
            reply: Any = SimpleNamespace(version_spans=(span,), task_index=version)
            entry.finished.append(reply)
        samples.collect()
        if is_pinned:
            assert entry not in samples.open
            assert (
                "version 4 is more than max_staleness = 2 steps" in entry.result.error
            )
        else:
            assert (entry.num_missing, len(entry.finished), entry in samples.open) == (
                1,
                1,
                True,
            )


async def test_a_model_that_rests_goes_on_after_a_restart_however_much_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_results, "MIN_KEPT", 2)
    with opened(tmp_path, lora=TWO) as loop:
        loop.history.checkpoint = loop.history.checkpoint._replace(step=9)
        operations_of_s = [
            passed("s:pass", 1, data=b"1234"),
            of("s:step", 2),
            refused("s:no", 3),
        ]
        refusals = [refused(f"t:no{number}", number, "t") for number in range(1, 20)]
        for operation in (begin("s"), begin("t"), *operations_of_s, *refusals):
            await loop.give(operation)
            if operation.HasField("compute"):
                loop.computes(operation.id)
            loop.step()
            await loop.write_results()
            # No one asks for the pass alone.
            if not operation.HasField("compute"):
                assert (await loop.result(operation.id)).is_done
        assert "s:step" not in loop.entries
    with opened(tmp_path, lora=TWO) as loop:
        model = loop.models.by_stream["s"]
        assert (model.next, model.passes) == (4, [])
