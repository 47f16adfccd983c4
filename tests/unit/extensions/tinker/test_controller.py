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

import pytest
from slipstream.core.errors import ProtocolError
from slipstream.core.types import PolicyVersion, ServerId, VersionSpan
from slipstream.extensions.tinker import controller, models
from slipstream.extensions.tinker.controller import KEPT, Operations
from slipstream.extensions.tinker.models import Entry
from slipstream.learner.controller.loop import BatchFormer
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.learner.controller.trajectories.batch import FormedBatch, SetAside, Trained
from slipstream.v1 import operations_pb2, trainer_pb2
from slipstream.v1.operations_pb2 import Operation
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S, until


class Refused(Exception):
    """A call was refused."""


class Refusing:
    """The context of a call, which may be refused."""

    async def abort(self, code: object, text: str, metadata: object) -> None:
        raise Refused(text)


ADAM = trainer_pb2.AdamNumbers(learning_rate=0.1)
STEPS = ["step1", "step2", "step3"]


class Loop:
    """The operations of one start of a controller, whose trainer makes each step at once."""

    def __init__(self, journal: Journal, folder: Path, **settings: dict) -> None:
        self._context: Any = Refusing()
        self.run = run_of(run={"name": "r", "steps": 9, "dir": str(folder)}, **settings)
        self.history = read_history(read_records(folder / "r" / "journal"))
        self.run.progress.reached(self.history.version)
        self.journal = journal
        unused: Any = None
        tasks: Any = asyncio
        books = books_of(self.run, journal=journal, state=self.history)
        self.former = BatchFormer(books, tasks)
        self.operations = Operations(self.run, books, unused, unused, unused, self.former)
        self.operations.restore(self.history)

    async def give(self, operation: Operation) -> None:
        await self.operations.Submit(operation, self._context)

    async def begin(self, operations: Sequence[Operation] = ()) -> None:
        """Gives these operations, or three steps, behind that which begins."""
        steps = [Operation(id=name, step=ADAM) for name in STEPS]
        begin = Operation(id="begin", begin=operations_pb2.Begin())
        for number, operation in enumerate([begin, *(operations or steps)]):
            operation.stream, operation.number = "s", number
            await self.give(operation)
        self.operations._look()

    async def write_results(self) -> None:
        """Lets all that is to be written reach the disk."""
        written = asyncio.create_task(self.operations._write_results())
        last = Entry(Operation())
        self.operations._ends.put_nowait(last)
        async with asyncio.timeout(LIMIT_S):
            await last.ended.wait()
        written.cancel()

    async def result(self, name: str) -> operations_pb2.OperationResult:
        asked = operations_pb2.AwaitRequest(id=name, limit_s=LIMIT_S)
        return await self.operations.Await(asked, self._context)

    def form(self) -> FormedBatch | None:
        """Journals the batch of the step whose turn it is; None if there is no such step."""
        self.operations._look()
        before = self.operations._before
        if before is not None and not before.ended.is_set():
            # The journal waits for it.
            return None
        given = self.operations.next_step()
        if given is None:
            return None
        step = self.history.next_step
        batch = FormedBatch(step, f"b{step:06d}", (), given)
        self.journal.append(self.journal.write_batch(batch.record))
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

    def model(self, stream: str) -> models.Model:
        """The model of a stream, which has one."""
        model = self.operations._models.of(stream)
        assert model is not None
        return model

    def made(self, batch: FormedBatch, **metrics: float) -> str:
        """Journals and reports the step of a batch; returns its id."""
        assert batch.given is not None
        report = trainer_pb2.StepReport(step=batch.step, batch_id=batch.batch_id, metrics=metrics)
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
        writes = asyncio.create_task(loop.operations._write_results())
        yield loop
        writes.cancel()


async def test_the_journal_has_a_step_when_the_result_before_it_is_on_the_disk(
    tmp_path: Path,
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
        assert [one["kind"] for one in read_records(journal)] == ["start"]
        await loop.write_results()
        assert await forming is not None
        assert [one["kind"] for one in read_records(journal)] == ["start", "batch"]


@pytest.mark.parametrize("error", ["", "the loss is inf"])
async def test_the_passes_of_a_step_are_written_while_the_last_one_is_computed(
    tmp_path: Path, error: str
) -> None:
    with opened(tmp_path) as loop:
        data, names = [trainer_pb2.PassSequence(token_ids=bytes(4))], ("first", "last")
        passes = [trainer_pb2.Pass(id=name, backward=True, sequences=data) for name in names]
        given = [Operation(id=one.id, compute=one) for one in passes]
        await loop.begin([*given, Operation(id="step", step=ADAM)])
        operations, asks = loop.operations, trainer_pb2.NextRequest()
        assert operations.order(asks) is not None
        operations.computed(trainer_pb2.PassReport(id="first"))
        folder = tmp_path / "r" / "journal" / "batches"
        assert not list(folder.iterdir())
        assert operations.order(asks) is not None
        await until(lambda: list(folder.iterdir()))
        (path,) = folder.iterdir()
        (tmp_path / "ahead").hardlink_to(path)
        operations.computed(trainer_pb2.PassReport(id="last", error=error))
        await loop.write_results()
        assert operations.order(asks) is None
        batch = await loop.former.form(operations.next_step())
        assert batch is not None
        # A step without the pass that failed has a file of its own.
        assert path.samefile(tmp_path / "ahead") is not bool(error)
        record: Any = list(read_records(folder.parent))[-1]
        found = loop.journal.read_batch(0, record["crc32"])
        assert [one.id for one in found.passes] == (["first"] if error else ["first", "last"])


async def test_a_trainer_that_wakes_before_the_loop_has_the_pass_whose_turn_it_is(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        operations = loop.operations
        compute = trainer_pb2.Pass(id="pass", backward=True)
        for each in [Operation(id="pass", compute=compute), Operation(id="next", step=ADAM)]:
            each.stream, each.number = "t", 1 + (each.id == "next")
            operations._models.take("t", trainer_pb2.Adapter()).next = 1
            await loop.give(each)
        operations._current = None
        directive = operations.order(trainer_pb2.NextRequest())
        assert directive is not None
        assert directive.compute.id == "pass"


async def test_an_operation_whose_turn_has_come_wakes_the_trainer(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        signal, loop.operations._current = loop.run.signal, None
        trainer = asyncio.create_task(signal.wait(LIMIT_S))
        await asyncio.sleep(0)
        loop.operations._take_turn()
        await asyncio.sleep(0)
        assert trainer.done()


async def test_a_step_whose_result_a_kill_has_lost_is_made_once(tmp_path: Path) -> None:
    made = []
    for start in range(3):
        with opened(tmp_path) as loop:
            if start == 0:
                await loop.begin()
            await loop.write_results()
            # The controller is killed before the result is written.
            made.append(loop.step())
    assert made == STEPS


async def test_a_result_that_a_kill_has_lost_comes_back_whole(tmp_path: Path) -> None:
    metrics = {"loss": 0.1, "grad_norm": math.inf, "kl": math.nan}
    with opened(tmp_path) as loop:
        await loop.begin()
        await loop.write_results()
        batch = loop.formed()
        loop.made(batch, **metrics)
        told = loop.operations._entries["step1"].result
        loop.journal.sync()
        # The controller is killed before the result is written.
    with opened(tmp_path) as loop:
        await loop.write_results()
        found = await loop.result("step1")
    assert (found.step, found.metrics["loss"]) == (1, 0.1)
    assert found.SerializeToString(deterministic=True) == told.SerializeToString(deterministic=True)


async def test_a_step_that_a_user_sets_aside_fails(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        await loop.write_results()
        batch = loop.formed()
        loop.journal.append(SetAside.of(batch, (), "x", by="user").record())
    with opened(tmp_path) as loop:
        await loop.write_results()
        assert (await loop.result("step1")).error == "batch b000000 was set aside"
        assert loop.step() == "step2"


async def test_a_long_loop_keeps_neither_sequences_nor_results_in_memory(tmp_path: Path) -> None:
    data = b"1234" * 1000
    sequences = [trainer_pb2.PassSequence(token_ids=data)]
    given = [
        Operation(
            id=name, compute=trainer_pb2.Pass(id=name, backward=backward, sequences=sequences)
        )
        for name, backward in (("forward", False), ("backward", True))
    ]

    async def check(loop: Loop) -> None:
        entries = loop.operations._entries.values()
        assert max(e.operation.ByteSize() + e.result.ByteSize() for e in entries) < 100
        for name in ("forward", "backward"):
            assert (await loop.result(name)).compute.logprobs[0] == data

    with opened(tmp_path) as loop:
        await loop.begin([*given, Operation(id="step", step=ADAM)])
        for each in given:
            loop.operations._look()
            loop.operations.computed(trainer_pb2.PassReport(id=each.id, logprobs=[data]))
        await loop.write_results()
        batch = loop.formed()
        assert batch.given is not None
        assert [one.sequences[0].token_ids for one in batch.given.passes] == [data]
        loop.made(batch)
        await loop.write_results()
        await check(loop)
    with opened(tmp_path) as loop:
        await check(loop)


TWO = {"rank": 8, "publish": "adapters", "adapters": ["a", "b"]}


def of_stream(stream: str, number: int, name: str, **operation: Any) -> Operation:
    return Operation(id=f"{stream}:{name}", stream=stream, number=number, **operation)


def begin_of(stream: str, rank: int) -> Operation:
    adapter = trainer_pb2.Adapter(rank=rank, alpha=1.0)
    return of_stream(stream, 0, "begin", begin=operations_pb2.Begin(adapter=adapter))


async def test_streams_have_turns_however_much_one_of_them_sends(tmp_path: Path) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        for stream, rank in (("s", 1), ("t", 8)):
            await loop.give(begin_of(stream, rank))
        await loop.makes("s:begin", "t:begin")
        for stream, numbers in (("s", range(1, 5)), ("t", range(1, 3))):
            for number in numbers:
                name = f"{stream}{number}"
                compute = trainer_pb2.Pass(id=name, backward=True)
                one = Operation(id=name, stream=stream, number=number, compute=compute)
                await loop.give(one)
        order = []
        for _ in range(6):
            loop.operations._look()
            directive = loop.operations.order(trainer_pb2.NextRequest())
            assert directive is not None
            order.append((directive.compute.id, directive.compute.adapter.name))
            loop.operations.computed(trainer_pb2.PassReport(id=directive.compute.id))
        names = [("s1", "a"), ("t1", "b"), ("s2", "a"), ("t2", "b"), ("s3", "a"), ("s4", "a")]
        assert order == names


async def test_models_are_taken_over_whatever_the_order_in_which_operations_came(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        late = [of_stream("s", n, f"step{n}", step=ADAM) for n in (2, 1)]
        for one in (begin_of("t", 8), begin_of("s", 1), *late):
            await loop.give(one)
        await loop.makes("t:begin", "s:begin", "s:step1", "s:step2")
    with opened(tmp_path, lora=TWO) as loop:
        await loop.give(of_stream("s", 3, "step3", step=ADAM))
        batch = loop.formed()
        assert batch.given is not None
        assert (batch.given.id, batch.given.message.adapter.name) == ("s:step3", "b")


async def test_a_beginning_that_a_kill_has_cut_has_its_place_again(tmp_path: Path) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        for stream in ("s", "t"):
            await loop.give(begin_of(stream, 1))
        assert loop.form() is not None
    with opened(tmp_path, lora=TWO) as loop:
        loop.operations._look()
        # The trainer has the batch of the first.
        assert loop.operations.next_step() is None
        assert loop.model("s").adapter.name == "a"
        assert loop.operations._models.of("t") is None


async def test_a_session_that_sends_too_much_must_wait_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "MAX_WAITING", 2)
    with opened(tmp_path, lora=TWO) as loop:
        for stream in ("s", "t"):
            await loop.give(begin_of(stream, 1))
        for number in (1, 2):
            await loop.give(of_stream("s", number, str(number), step=ADAM))
        with pytest.raises(Refused, match="2 requests of session s wait: "):
            await loop.give(of_stream("s", 3, "3", step=ADAM))
        await loop.give(of_stream("t", 1, "1", step=ADAM))
        # One that is sent again is known.
        await loop.give(of_stream("s", 2, "2", step=ADAM))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, where thousands of writes need not reach a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Client:
    """A client's loop of passes with a step after nine of them, each told as soon as it ends."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.number = loop, 0

    async def order(self, **operation: object) -> operations_pb2.OperationResult:
        """Carries an operation out, its trainer's part too, and returns its result."""
        operations = self.loop.operations
        name = f"s:{self.number}"
        if "compute" in operation:
            data = [trainer_pb2.PassSequence(token_ids=bytes(400))]
            operation["compute"] = trainer_pb2.Pass(id=name, backward=True, sequences=data)
        given = Operation(id=name, stream="s", number=self.number, **operation)
        self.number += 1
        await self.loop.give(given)
        operations._look()
        if "compute" in operation:
            operations.computed(trainer_pb2.PassReport(id=name, logprobs=[bytes(400)]))
        elif "step" in operation:
            await until(lambda: operations._before.ended.is_set())
            progress = self.loop.run.progress
            version = PolicyVersion(0, progress.version.step + 1)
            batch = FormedBatch(version.step - 1, "b", (), operations.next_step())
            progress.reached(version)
            trained = Trained(batch, version, again=False)
            operations.stepped(trained, trainer_pb2.StepReport(), None)
        return await self.loop.result(name)


@pytest.mark.long
async def test_ten_thousand_operations_leave_few_on_the_disk_and_in_memory(in_memory: Path) -> None:
    most, files = 2 * KEPT + 16, in_memory / "r" / "operations"
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=operations_pb2.Begin())
        while client.number < 10_000:
            for _ in range(9):
                await client.order(compute=True)
            assert not (await client.order(step=ADAM)).error
            # A checkpoint every ten steps covers what was before it.
            covered = loop.run.progress.version.step // 10 * 10
            loop.history.checkpoint = loop.history.checkpoint._replace(step=covered)
            assert len(loop.operations._entries) <= most
        assert len(list(files.iterdir())) <= 2 * most
        pending = [await client.order(compute=True) for _ in range(2)]
        assert not any(one.error for one in pending)
    async with writing(in_memory) as loop:
        # It goes on behind the newest one, with the passes that no step has yet.
        client.loop, (model,) = loop, loop.operations._models.in_turn()
        assert (model.next, len(model.passes)) == (client.number, 2)
        assert not (await client.order(compute=True)).error
        client.number = 5
        assert (await client.order(compute=True)).error == (
            "s:5 was carried out; its result is not kept any more"
        )


@pytest.mark.long
async def test_what_went_with_the_step_of_very_many_passes_is_not_written_again(in_memory) -> None:
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=operations_pb2.Begin())
        while client.number < 3 * KEPT - 1:
            await client.order(compute=True)
        # The operations are looked through when the step has ended.
        assert not (await client.order(step=ADAM)).error
        await until(loop.operations._ends.empty)
        await client.order(refused=operations_pb2.Refused(cause="no"))
        files = list((in_memory / "r" / "operations").iterdir())
        assert len(files) < 3 * KEPT
        assert all(path.with_suffix(".result").exists() for path in files)


async def test_operations_stay_as_long_as_their_names_are_known(in_memory: Path) -> None:
    async with writing(in_memory) as loop:
        client = Client(loop)
        await client.order(begin=operations_pb2.Begin())
        await client.order(save=operations_pb2.Save(name="start"))
        for _ in range(2 * KEPT):
            await client.order(refused=operations_pb2.Refused(cause="no"))
        assert {"s:0", "s:1"} <= loop.operations._entries.keys()
        assert "s:2" not in loop.operations._entries
        assert "start" in Loop(loop.journal, in_memory).operations._models.named


async def test_the_step_behind_a_publish_waits_for_a_server_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        await loop.write_results()
        publish = Entry(Operation(publish=operations_pb2.Publish(name="x")))
        loop.operations._models.named["x"] = models.Named(0, entry=publish)
        # Servers that join after a restart get the newest version.
        assert loop.form() is None
        loop.operations._fleet = Fleet(0)  # type: ignore[assignment]
        assert loop.operations.next_step() is not None


async def test_a_client_that_died_unsaved_goes_on_from_the_newest_state(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin([Operation(id="step1", step=ADAM)])
        await loop.write_results()
        await loop.makes("step1")
        for number, stream in enumerate(("t", "u")):
            path = ("tinker://newest", "tinker://t/newest")[number]
            load = operations_pb2.Load(name=path)
            await loop.give(Operation(id=stream, stream=stream, load=load))
            # The trainer is asked for nothing.
            loop.operations._look()
            assert loop.operations.next_step() is None
            await loop.write_results()
            assert (await loop.result(stream)).step == 1
        late = Operation(id="late", stream="s", number=2, step=ADAM)
        await loop.give(late)
        await loop.write_results()
        assert "is not trained by this run any more" in (await loop.result("late")).error


async def test_a_request_that_a_kill_has_cut_is_none(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        torn = tmp_path / "r" / "operations" / ".000000004.request"
        torn.write_bytes(b"\n")
        assert len(Loop(loop.journal, tmp_path).operations._entries) == 4
        assert not torn.exists()


async def test_a_caller_that_goes_and_comes_again_leaves_one_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        store, begins, may_write = loop.operations._store, threading.Event(), threading.Event()

        def write(number: int, operation: Operation, write=store.write) -> None:
            begins.set()
            may_write.wait(LIMIT_S)
            write(number, operation)

        monkeypatch.setattr(store, "write", write)
        late = Operation(id="late", stream="s", number=4, step=ADAM)
        call = asyncio.create_task(loop.give(late))
        await asyncio.to_thread(begins.wait, LIMIT_S)
        call.cancel()
        again = asyncio.create_task(loop.give(late))
        may_write.set()
        await again
        assert call.cancelled()
        assert [one.id for _, one, _ in store.read()].count("late") == 1


async def test_an_operation_that_begins_no_model_does_not_take_one_over(tmp_path: Path) -> None:
    with opened(tmp_path) as loop:
        await loop.begin()
        strange = Operation(id="x", stream="s", step=ADAM)
        await loop.give(strange)
        await loop.write_results()
        assert [loop.step(), loop.step()] == ["step1", ""]
        await loop.write_results()
        await loop.makes("step2", "step3")
        loop.operations._look()
        await loop.write_results()
        assert "x has number 0, which is that of a" in (await loop.result("x")).error
        assert loop.model("s").next == 4


async def test_a_model_that_waits_for_its_turn_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        for stream in ("s", "t"):
            await loop.give(begin_of(stream, 1))
        await loop.makes("s:begin", "t:begin")
        for stream in ("s", "t"):
            await loop.give(of_stream(stream, 1, "step1", step=ADAM))
        later = itertools.count(models.time.monotonic() + models.IDLE_S + 1)
        monkeypatch.setattr(models.time, "monotonic", lambda: next(later))
        await loop.give(begin_of("u", 1))
        await loop.makes("s:step1", "t:step1")
        assert "all 2 places for models" in (await loop.result("u:begin")).error


async def test_samples_go_once_told_and_the_oldest_untold_ones_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "KEPT", 2)
    async with writing(tmp_path) as loop:
        names = [str(number) for number in range(40)]
        entries = loop.operations._entries

        async def end(names: Sequence[str]) -> None:
            for name in names:
                entry = entries[name]
                loop.operations._samples._over(entry)
                await until(entry.ended.is_set)

        results = await sampled(loop, names[:7])
        await end(names[1:7])
        assert [(await anext(results)).id for _ in names[1:7]] == names[1:7]
        # The HTTP process had these, and is gone before their clients were told.
        await results.aclose()
        assert set(names[:7]) == entries.keys()
        results = await sampled(loop, names[7:20])
        await end(names[7:20])
        await results.aclose()
        results = await sampled(loop, names[20:30], told=names[7:20])
        await end(names[20:30])
        await results.aclose()
        assert {*names[:7], "28", "29"} <= entries.keys()
        assert not {*names[7:20]} & entries.keys()
        monkeypatch.setattr(controller, "MAX_KEPT", 3)
        results = await sampled(loop, names[30:])
        await end(names[30:])
        await results.aclose()
        # The first is under way; of the others the newest stay.
        assert {"0", *names[36:]} <= entries.keys()
        assert not {*names[1:30]} & entries.keys()


async def sampled(loop: Loop, names: Sequence[str], told: Sequence[str] = ()) -> Any:
    """The results of samples that a stream, which stays open, has brought."""

    async def asked() -> AsyncIterator[Operation]:
        for name in names:
            yield Operation(id=name, sample=operations_pb2.Sample(num_samples=1), told=told)
        await asyncio.Event().wait()

    answers = loop.operations.Sample(asked(), loop._context)
    first = asyncio.ensure_future(anext(answers))
    await until(lambda: all(name in loop.operations._entries for name in names))

    async def results() -> AsyncIterator[operations_pb2.OperationResult]:
        yield await first
        async for each in answers:
            yield each

    return results()


async def test_a_sample_whose_stream_broke_is_told_to_the_next_one(tmp_path: Path) -> None:
    async with writing(tmp_path) as loop:
        for _ in range(2):
            told = await sampled(loop, ["a"])
            entry = loop.operations._entries["a"]
            if not entry.ended.is_set():
                loop.operations._samples._over(entry)
            assert (await anext(told)).id == "a"
            await told.aclose()
        assert (await loop.result("a")).is_done


async def test_the_records_of_samples_that_are_leased_together_are_written_together(
    tmp_path: Path,
) -> None:
    class Leasing:
        sent: list[int] = []

        def room(self, _: object) -> int:
            return 100

        may_send = room

        def send_evaluation(self, _: object, groups: Sequence[object]) -> None:
            self.sent.append(len(groups))

    with opened(tmp_path) as loop:
        told = await sampled(loop, [str(number) for number in range(20)])
        samples: Any = loop.operations._samples
        samples._scheduler, samples._fleet = Leasing(), Fleet(0)
        samples.lease(None)
        samples.lease(None)
        assert Leasing.sent == [20]
        await told.aclose()


async def test_only_samples_go_on_their_stream(tmp_path: Path) -> None:
    async def asked() -> AsyncIterator[Operation]:
        yield Operation(id="step", step=ADAM)

    with opened(tmp_path) as loop:
        with pytest.raises(ProtocolError, match="step is no sample"):
            await anext(loop.operations.Sample(asked(), loop._context))
        with pytest.raises(ProtocolError, match="x is a sample, which goes on the stream"):
            await loop.give(Operation(id="x", sample=operations_pb2.Sample()))


class Fleet:
    """A fleet of servers by their versions."""

    def __init__(self, *steps: int) -> None:
        self._sessions = [Serving(PolicyVersion(0, step)) for step in steps]

    def serving(self) -> list["Serving"]:
        return self._sessions


class Serving:
    """A server."""

    def __init__(self, version: PolicyVersion) -> None:
        self.version, self.key = version, ServerKey(ServerId("s"), 1)


def test_a_session_in_flight_is_not_of_the_model_that_had_its_place_before(tmp_path: Path) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        model = loop.operations._models.take("s", trainer_pb2.Adapter(rank=1, alpha=1.0))
        model.served, fleet = 5, Fleet(4, 5, 6)
        samples: Any = loop.operations._samples
        samples._fleet = fleet
        found, gone = samples._sessions(models.Named(models.NEWEST, model))
        assert ([one.version.step for one in found], gone) == ([5, 6], "")


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_replies_that_became_too_stale_under_way_are_sampled_anew_or_refused(
    tmp_path: Path, is_pinned: bool
) -> None:
    with opened(tmp_path, lora=TWO) as loop:
        model = loop.operations._models.take("s", trainer_pb2.Adapter(rank=1, alpha=1.0))
        model.max_staleness, model.steps, model.published = 2, 5, {4: 2, 7: 3}
        step = 4 if is_pinned else models.NEWEST
        loop.operations._models.named["x"] = models.Named(step, model, since=4)
        sample = operations_pb2.Sample(num_samples=2, name="x")
        entry = Entry(Operation(id="s:0", sample=sample), num_wanted=2, num_leased=2)
        samples: Any = loop.operations._samples
        samples._intake = SimpleNamespace(withdraw=lambda *_: None)
        samples.open[entry] = None
        # That of version 6 has the values of the publish before.
        for version in (6, 7):
            span = VersionSpan(1, PolicyVersion(0, version))
            reply: Any = SimpleNamespace(version_spans=(span,), task_index=version)
            entry.finished.append(reply)
        samples._finish(entry)
        if is_pinned:
            assert entry not in samples.open
            assert "version 4 is more than max_staleness = 2 steps" in entry.result.error
        else:
            assert (entry.num_leased, len(entry.finished), entry in samples.open) == (1, 1, True)


async def test_a_model_that_rests_goes_on_after_a_restart_however_much_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "KEPT", 2)
    with opened(tmp_path, lora=TWO) as loop:
        loop.history.checkpoint = loop.history.checkpoint._replace(step=9)
        data = [trainer_pb2.PassSequence(token_ids=b"1234")]
        compute = trainer_pb2.Pass(id="s:pass", backward=True, sequences=data)
        no = operations_pb2.Refused(cause="no")
        for one in (
            *(begin_of(stream, 1) for stream in ("s", "t")),
            of_stream("s", 1, "pass", compute=compute),
            of_stream("s", 2, "step", step=ADAM),
            of_stream("s", 3, "no", refused=no),
            *(of_stream("t", number, f"no{number}", refused=no) for number in range(1, 20)),
        ):
            await loop.give(one)
            if one.HasField("compute"):
                loop.operations._look()
                loop.operations.computed(trainer_pb2.PassReport(id="s:pass"))
            loop.step()
            await loop.write_results()
            # Nobody asks for the pass alone.
            if not one.HasField("compute"):
                assert (await loop.result(one.id)).is_done
        assert "s:step" not in loop.operations._entries
    with opened(tmp_path, lora=TWO) as loop:
        assert (loop.model("s").next, loop.model("s").passes) == (4, [])
