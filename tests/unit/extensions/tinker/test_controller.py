"""Steps of a client's loop, when kills come between the journal and the results on the disk."""

import asyncio
from pathlib import Path
from typing import Any

from slipstream.core.types import PolicyVersion
from slipstream.extensions.tinker.controller import Operations
from slipstream.learner.controller.records import kinds
from slipstream.learner.controller.records.history import read_history
from slipstream.learner.controller.records.journal import Journal, read_records
from slipstream.learner.controller.trajectories.batch import FormedBatch, SetAside
from slipstream.learner.controller.trajectories.batches import Trained
from slipstream.v1 import operations_pb2, trainer_pb2
from support.rigs.lease_rig import books_of
from support.rigs.publishing_scene import run_of
from support.rigs.waiting import LIMIT_S

STEPS = ["step1", "step2", "step3"]


class Loop:
    """The operations of one start of a controller, whose trainer makes each step at once."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.run = run_of(run={"name": "r", "steps": 9, "dir": str(folder)})
        self.history = read_history(read_records(folder / "r" / "journal"))
        self.run.progress.reached(self.history.version)
        self.journal = journal
        unused: Any = None
        books = books_of(self.run, journal=journal, state=self.history)
        self.operations = Operations(self.run, books, unused, unused, unused)
        self.operations.restore(self.history)

    async def submit(self) -> None:
        begin = operations_pb2.Operation(id="begin", stream="s", begin=operations_pb2.Begin())
        context: Any = None
        await self.operations.Submit(begin, context)
        for number, name in enumerate(STEPS, start=1):
            step = operations_pb2.Operation(id=name, stream="s", number=number)
            step.step.learning_rate = 0.1
            await self.operations.Submit(step, context)
        self.operations._look()

    async def write_results(self) -> None:
        """Lets all results reach the disk."""
        results = asyncio.create_task(self.operations._write_results())
        known = self.operations._entries.values()
        async with asyncio.timeout(LIMIT_S):
            for entry in known:
                if entry.result.is_done:
                    await entry.ended.wait()
        results.cancel()

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
        if batch is None or batch.given is None:
            return ""
        version = PolicyVersion(0, batch.version)
        self.journal.append(kinds.Step(batch.step, version, "abc", lags=[], several=0))
        self.run.progress.reached(version)
        trained = Trained(batch, version, again=False)
        self.operations.stepped(trained, trainer_pb2.StepReport(), [])
        return batch.given.id


async def begun(journal: Journal, folder: Path) -> Loop:
    journal.append(kinds.Start(format=1, run_id="r"))
    journal.sync()
    loop = Loop(journal, folder)
    await loop.submit()
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
        assert loop.operations._entries["step1"].result.error.startswith("batch b000000 was set")
        assert loop.step() == "step2"
