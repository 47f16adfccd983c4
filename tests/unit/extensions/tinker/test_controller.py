"""Steps of a client's loop, when kills come between the journal and the results on the disk."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.types import PolicyVersion
from slipstream.extensions.tinker import controller
from slipstream.extensions.tinker.controller import Operations
from slipstream.extensions.tinker.models import Entry
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.trajectories.batch import FormedBatch, SetAside
from slipstream.learner.controller.trajectories.batches import Trained
from slipstream.v1 import operations_pb2, trainer_pb2
from slipstream.v1.operations_pb2 import Operation
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S


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
        self.run = run_of(run={"name": "r", "steps": 9, "dir": str(folder)}, **settings)
        self.history = read_history(read_records(folder / "r" / "journal"))
        self.run.progress.reached(self.history.version)
        self.journal = journal
        unused: Any = None
        books = books_of(self.run, journal=journal, state=self.history)
        self.operations = Operations(self.run, books, unused, unused, unused)
        self.operations.restore(self.history)

    async def submit(self, operations: Sequence[Operation]) -> None:
        context: Any = None
        for number, operation in enumerate(operations):
            operation.stream, operation.number = "s", number
            await self.operations.Submit(operation, context)
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
        context: Any = None
        asked = operations_pb2.AwaitRequest(id=name, limit_s=LIMIT_S)
        return await self.operations.Await(asked, context)

    def form(self) -> FormedBatch | None:
        """Journals the batch of the step whose turn it is; None if there is no such step."""
        self.operations._look()
        given = self.operations.next_step()
        if given is None:
            return None
        step = self.history.next_step
        batch = FormedBatch(step, f"b{step:06d}", (), given)
        self.journal.append(self.journal.write_batch(batch.record))
        return batch

    def step(self) -> str:
        """Makes the step whose turn it is, up to its record; returns its id, or ""."""
        batch = self.form()
        return "" if batch is None else self.made(batch)

    def made(self, batch: FormedBatch) -> str:
        """Journals and reports the step of a batch; returns its id."""
        assert batch.given is not None
        version = PolicyVersion(0, batch.version)
        self.journal.append(kinds.Step(batch.step, version, "abc", lags=[], several=0))
        self.run.progress.reached(version)
        trained = Trained(batch, version, again=False)
        self.operations.stepped(trained, trainer_pb2.StepReport(), [])
        return batch.given.id


async def begun(journal: Journal, folder: Path, operations: Sequence[Operation] = ()) -> Loop:
    """The first start, with these operations or three steps behind that which begins."""
    journal.append(kinds.Start(format=1, run_id="r"))
    journal.sync()
    loop = Loop(journal, folder)
    steps = [Operation(id=name, step=ADAM) for name in STEPS]
    await loop.submit([Operation(id="begin", begin=operations_pb2.Begin()), *(operations or steps)])
    return loop


async def test_a_step_begins_when_all_results_before_it_are_on_the_disk(tmp_path: Path) -> None:
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = await begun(journal, tmp_path)
        assert loop.step() == ""
        await loop.write_results()
        assert [loop.step(), loop.step()] == ["step1", ""]
        await loop.write_results()
        assert loop.step() == "step2"


async def test_a_step_whose_result_a_kill_has_lost_is_made_once(tmp_path: Path) -> None:
    made = []
    for start in range(3):
        with Journal(tmp_path / "r" / "journal") as journal:
            loop = Loop(journal, tmp_path) if start else await begun(journal, tmp_path)
            await loop.write_results()
            # The controller is killed before the result is written.
            made.append(loop.step())
    assert made == STEPS


async def test_a_step_that_a_user_sets_aside_fails(tmp_path: Path) -> None:
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = await begun(journal, tmp_path)
        await loop.write_results()
        batch = loop.form()
        assert batch is not None
        journal.append(SetAside.of(batch, (), "x", by="user").record())
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = Loop(journal, tmp_path)
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

    with Journal(tmp_path / "r" / "journal") as journal:
        loop = await begun(journal, tmp_path, [*given, Operation(id="step", step=ADAM)])
        for each in given:
            loop.operations._look()
            loop.operations.computed(trainer_pb2.PassReport(id=each.id, logprobs=[data]))
        await loop.write_results()
        batch = loop.form()
        assert batch is not None
        assert batch.given is not None
        assert [one.sequences[0].token_ids for one in batch.given.passes] == [data]
        loop.made(batch)
        await loop.write_results()
        await check(loop)
    with Journal(tmp_path / "r" / "journal") as journal:
        await check(Loop(journal, tmp_path))


TWO = {"rank": 8, "publish": "adapters", "adapters": ["a", "b"]}


def of_stream(stream: str, number: int, name: str, **operation: Any) -> Operation:
    return Operation(id=f"{stream}:{name}", stream=stream, number=number, **operation)


def begin_of(stream: str, rank: int) -> Operation:
    adapter = trainer_pb2.Adapter(rank=rank, alpha=1.0)
    return of_stream(stream, 0, "begin", begin=operations_pb2.Begin(adapter=adapter))


async def test_streams_have_turns_however_much_one_of_them_sends(tmp_path: Path) -> None:
    context: Any = None
    journal = Journal(tmp_path / "r" / "journal")
    with journal:
        journal.append(kinds.Start(format=1, run_id="r"))
        journal.sync()
        loop = Loop(journal, tmp_path, lora=TWO)
        for stream, rank in (("s", 1), ("t", 8)):
            await loop.operations.Submit(begin_of(stream, rank), context)
        for stream in ("s:begin", "t:begin"):
            assert loop.step() == stream
            await loop.write_results()
        for stream, numbers in (("s", range(1, 5)), ("t", range(1, 3))):
            for number in numbers:
                name = f"{stream}{number}"
                compute = trainer_pb2.Pass(id=name, backward=True)
                one = Operation(id=name, stream=stream, number=number, compute=compute)
                await loop.operations.Submit(one, context)
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
    context: Any = None
    with Journal(tmp_path / "r" / "journal") as journal:
        journal.append(kinds.Start(format=1, run_id="r"))
        journal.sync()
        loop = Loop(journal, tmp_path, lora=TWO)
        late = [of_stream("s", n, f"step{n}", step=ADAM) for n in (2, 1)]
        for one in (begin_of("t", 8), begin_of("s", 1), *late):
            await loop.operations.Submit(one, context)
        for name in ("t:begin", "s:begin", "s:step1", "s:step2"):
            assert loop.step() == name
            await loop.write_results()
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = Loop(journal, tmp_path, lora=TWO)
        await loop.operations.Submit(of_stream("s", 3, "step3", step=ADAM), context)
        batch = loop.form()
        assert batch is not None
        assert batch.given is not None
        assert (batch.given.id, batch.given.message.adapter.name) == ("s:step3", "b")


async def test_a_beginning_that_a_kill_has_cut_has_its_place_again(tmp_path: Path) -> None:
    context: Any = None
    with Journal(tmp_path / "r" / "journal") as journal:
        journal.append(kinds.Start(format=1, run_id="r"))
        journal.sync()
        loop = Loop(journal, tmp_path, lora=TWO)
        for stream in ("s", "t"):
            await loop.operations.Submit(begin_of(stream, 1), context)
        assert loop.form() is not None
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = Loop(journal, tmp_path, lora=TWO)
        loop.operations._look()
        # The trainer has the batch of the first.
        assert loop.operations.next_step() is None
        model = loop.operations._models.of("s")
        assert model is not None
        assert model.adapter.name == "a"
        assert loop.operations._models.of("t") is None


async def test_a_session_that_sends_too_much_must_wait_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "MAX_WAITING", 2)
    context: Any = Refusing()
    with Journal(tmp_path / "r" / "journal") as journal:
        loop = Loop(journal, tmp_path, lora=TWO)
        for stream in ("s", "t"):
            await loop.operations.Submit(begin_of(stream, 1), context)
        for number in (1, 2):
            await loop.operations.Submit(of_stream("s", number, str(number), step=ADAM), context)
        with pytest.raises(Refused, match="2 requests of session s wait already"):
            await loop.operations.Submit(of_stream("s", 3, "3", step=ADAM), context)
        await loop.operations.Submit(of_stream("t", 1, "1", step=ADAM), context)
        # One that is sent again is known.
        await loop.operations.Submit(of_stream("s", 2, "2", step=ADAM), context)
