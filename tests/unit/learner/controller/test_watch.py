"""What ends a run that cannot go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.watch import RunWatch
from slipstream.v1 import status_pb2
from support.rigs.lease_rig import SoundJournal, books_of
from support.rigs.publishing_scene import Scene, run_of


@dataclass
class Watched:
    """A run whose one server has served a version, under a watch."""

    scene: Scene
    watching: asyncio.Task[None]

    @classmethod
    async def start(cls, run: Run, tasks: asyncio.TaskGroup) -> Watched:
        scene = Scene(run, tasks)
        await scene.serve()
        books = books_of(run, fleet=scene.fleet, journal=SoundJournal())
        watch = RunWatch(run, books, lambda *_: None)
        return cls(scene, tasks.create_task(watch.watch_forever()))

    async def until_over(self) -> None:
        async with asyncio.timeout(10):
            while not self.scene.run.progress.is_over:
                await self.scene.run.signal.wait(1.0)
        self.watching.cancel()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_trainer_that_never_ends_a_publish_ends_the_run(*, begun: bool) -> None:
    weights = {"join_deadline_s": 0.05, "bucket_deadline_s": 0.05}
    run = run_of(controller={"stall_timeout_s": 0.2}, weights=weights)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        watched = await Watched.start(run, tasks)
        scene = watched.scene
        if not begun:
            scene.trainer.communicator_id = ""
        order = await scene.ordered()
        assert order.begun == begun
        if not begun:
            assert scene.publisher.start(scene.start_of(order))
        # No server serves, and no message of the trainer will ever end the publish.
        assert not scene.fleet.serving()
        await watched.until_over()
        assert run.progress.state == status_pb2.RUN_STATE_FAILED
        assert run.progress.cause.startswith(f"the trainer did not end publish {order.publish_id} ")


async def test_nothing_is_owed_by_a_trainer_that_has_ended_its_publish() -> None:
    run = run_of()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        watched = await Watched.start(run, tasks)
        assert run.progress.pending_publish is None
        order = await watched.scene.ordered()
        assert run.progress.pending_publish is not None
        watched.scene.publisher.trainer_lost()
        assert run.progress.pending_publish is None
        assert order.begun
        watched.watching.cancel()
