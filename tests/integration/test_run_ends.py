"""How a run ends: what it waits for, and as what it is shown."""

import asyncio
import re

import pytest
from slipstream.client import Client
from slipstream.learner.controller import application
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import LIMIT_S, until

# The controller gives up a trainer that is silent for so long at the end.
TIMEOUT_S = 2.2
GRACE_S = 0.3
SILENCE_S = TIMEOUT_S + GRACE_S
SETTINGS = {
    "run__steps": 2,
    "learner__timeout_s": TIMEOUT_S,
    "weights__join_deadline_s": 1.0,
    "weights__bucket_deadline_s": 0.1,
}


class ExportingTrainer(FakeTrainer):
    """Exports for `export_s`, and says every `sign_s` that it works; None: never."""

    export_s = 0.0
    sign_s = None

    async def export(self) -> None:
        if self.sign_s is None:
            await asyncio.sleep(self.export_s)
            return
        for _ in range(int(self.export_s / self.sign_s)):
            await asyncio.sleep(self.sign_s)
            await self.sign()


async def test_an_export_longer_than_any_limit_is_waited_for_while_the_trainer_works(
    tmp_path, monkeypatch
):
    config = make_config(tmp_path, **SETTINGS)
    trainer = ExportingTrainer(config.controller.address)
    trainer.export_s = 1.6 * SILENCE_S
    trainer.sign_s = 0.2
    seen = set()
    exporting = ("stopping", "the trainer to save and export the model")

    async def look(controller, tasks):
        async with Client(config.controller.address) as client:
            await until(lambda: trainer.stop_reason)
            # The controller looks for the end of its run twenty times a second.
            async with asyncio.timeout(LIMIT_S):
                while exporting not in seen:
                    status = await client.status()
                    seen.add((status.state, status.waiting_for))
                    await asyncio.sleep(0.02)

    monkeypatch.setattr(application, "GOODBYE_LIMIT_S", GRACE_S)
    summary = await play(config, trainer=trainer, during=look)
    assert (summary["code"], summary["state"]) == (0, "finished")
    assert exporting in seen


async def test_a_run_without_its_model_has_failed(tmp_path, monkeypatch):
    config = make_config(tmp_path, **SETTINGS)
    trainer = ExportingTrainer(config.controller.address)
    trainer.export_s = 600.0
    monkeypatch.setattr(application, "GOODBYE_LIMIT_S", GRACE_S)
    summary = await play(config, trainer=trainer, wait_for_trainer=False)
    assert (summary["code"], summary["state"], summary["steps"]) == (1, "failed", 2)
    assert re.match(
        r"nothing was heard of the trainer for \d+ s while it was to ", summary["cause"]
    )


async def test_a_trainer_that_leaves_without_the_model_fails_the_run(tmp_path):
    config = make_config(tmp_path, **SETTINGS)
    trainer = FakeTrainer(config.controller.address)
    trainer.export_path = ""
    summary = await play(config, trainer=trainer)
    assert (summary["code"], summary["state"]) == (1, "failed")
    assert summary["cause"].startswith("the trainer left without exporting the model")


async def test_a_trainer_that_fails_while_it_exports_is_not_waited_for(tmp_path):
    config = make_config(tmp_path, **SETTINGS | {"learner__timeout_s": 600.0})
    trainer = ExportingTrainer(config.controller.address)
    trainer.export_s = 600.0

    async def fail(controller, tasks):
        await until(lambda: trainer.stop_reason)
        controller._progress.fail("the disk is full")

    summary = await play(config, trainer=trainer, during=fail, wait_for_trainer=False)
    assert (summary["code"], summary["cause"]) == (1, "the disk is full")


async def test_a_trainer_that_dies_while_it_exports_may_come_again(tmp_path):
    config = make_config(tmp_path, **SETTINGS)
    address = config.controller.address
    first = ExportingTrainer(address, checkpoint_every=1)
    first.export_s = 600.0
    second = FakeTrainer(address)

    async def die(controller, tasks):
        await until(lambda: first.stop_reason)
        first.place.cancel()
        # The second trainer makes both versions again, and leaves with the same weights.
        await second.run()

    summary = await play(config, trainer=first, during=die, wait_for_trainer=False)
    assert (summary["code"], summary["state"]) == (0, "finished")
    assert second.version == first.version
    assert summary["weight_digest"] == first.digest.hex()


async def test_a_run_that_was_stopped_is_shown_as_stopped(tmp_path):
    config = make_config(tmp_path, run__steps=100_000)
    states = []

    async def stop(controller, tasks):
        async with Client(config.controller.address) as client:
            async for event in client.watch():
                if event.step == 2:
                    await client.stop("enough")
                if event.final_state:
                    states.append(event.final_state)

    summary = await play(config, during=stop)
    assert states == ["stopped"]
    assert (summary["code"], summary["state"], summary["cause"]) == (
        0,
        "stopped",
        "enough",
    )
    assert 2 <= summary["steps"] < 100_000


class SlowTrainer(FakeTrainer):
    """Needs `slow_step_s` for its first step, and says every `sign_s` that it works, or never."""

    slow_step_s = 0.0
    sign_s = None

    async def train(self) -> None:
        if self.version.step or self.sign_s is None:
            await asyncio.sleep(self.slow_step_s if not self.version.step else 0.0)
            return
        for _ in range(int(self.slow_step_s / self.sign_s)):
            await asyncio.sleep(self.sign_s)
            await self.sign()


@pytest.mark.parametrize("works", [True, False])
async def test_a_step_longer_than_the_limit_of_a_stall_is_one_only_when_the_trainer_is_silent(
    tmp_path, *, works
):
    config = make_config(tmp_path, run__steps=2, controller__stall_timeout_s=2.0)
    trainer = SlowTrainer(config.controller.address)
    trainer.slow_step_s, trainer.sign_s = (4.0, 0.2) if works else (600.0, None)
    summary = await play(config, trainer=trainer, wait_for_trainer=works)
    if works:
        assert (summary["code"], summary["steps"]) == (0, 2)
    else:
        assert summary["code"] == 1
        assert summary["cause"].endswith(
            "while waiting for the trainer to make version 1"
        )


async def test_a_short_limit_of_the_trainer_is_no_limit_of_its_idle_calls(tmp_path):
    config = make_config(tmp_path, **SETTINGS | {"learner__timeout_s": 8.0})
    server = FakeServer(config.controller.address)
    trainer = FakeTrainer(config.controller.address)
    server.gate.clear()
    waits = []

    async def hold(controller, tasks):
        await until(lambda: trainer.num_waits >= 2)
        waits.append(trainer.num_waits)
        server.gate.set()

    # The trainer's client calls like this: within half of the limit of a collective.
    trainer.call_timeout_s = 4.0
    summary = await play(config, server, trainer=trainer, during=hold)
    assert (summary["code"], summary["steps"]) == (0, 2)
    assert waits


@pytest.mark.parametrize(
    "limits",
    [
        {
            "controller__heartbeat_timeout_s": 1.0,
            "controller__lease_timeout_s": 1.0,
            "weights__bucket_deadline_s": 0.1,
            "weights__join_deadline_s": 1.0,
        },
        {
            "controller__heartbeat_timeout_s": 1e9,
            "controller__stall_timeout_s": 1e9,
            "controller__lease_timeout_s": 1e9,
            "learner__timeout_s": 1e9,
            "weights__bucket_deadline_s": 1e8,
            "weights__join_deadline_s": 1e8,
            "rollout_server__start_timeout_s": 1e9,
        },
    ],
    ids=["shortest", "longest"],
)
async def test_a_run_gets_on_with_its_limits_at_their_ends(tmp_path, limits):
    config = make_config(tmp_path, **{"run__steps": 2} | limits)
    summary = await play(config)
    assert (summary["code"], summary["steps"]) == (0, 2)
