"""What a part of the controller that somebody adds is told of."""

import asyncio

from slipstream.learner.controller.application import Controller
from slipstream.learner.controller.part import Part
from support.rigs.controller_runs import make_config, play


class Witness(Part):
    """Notes the events of the run."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def _wait(self) -> None:
        self.told.append("begins")
        await asyncio.Event().wait()

    def tasks(self):
        return {"witness": self._wait()}

    def joined(self, session) -> None:
        self.told.append(f"{session.name} joined")

    def reported(self, session, report) -> None:
        self.told.append(f"{session.name} reported")

    def stepped(self, trained, report, given_s) -> None:
        assert given_s is not None
        self.told.append(f"step {trained.version.step}")

    def drains(self, session) -> None:
        self.told.append(f"{session.name} drains")

    def lost(self, session) -> None:
        self.told.append(f"{session.name} is gone")


async def test_a_part_is_told_of_servers_and_steps_and_has_tasks_of_its_own(
    tmp_path, monkeypatch
) -> None:
    witness = Witness()
    make_parts = Controller._make_parts

    def with_witness(controller: Controller, tasks: asyncio.TaskGroup) -> None:
        make_parts(controller, tasks)
        controller.parts.append(witness)

    monkeypatch.setattr(Controller, "_make_parts", with_witness)
    await play(make_config(tmp_path, run__steps=2))
    events = [event for event in witness.told if event != "fake reported"]
    assert events == [
        "begins",
        "fake joined",
        "step 1",
        "step 2",
        "fake drains",
        "fake is gone",
    ]
    assert "fake reported" in witness.told
