"""Learner and engines of one GPU in turn: whole runs of the controller with fakes."""

import asyncio
from pathlib import Path

import pytest
from slipstream.core.settings.config import Config
from slipstream.v1 import weights_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import until


class TrainerBeside(FakeTrainer):
    """Trains on the servers' device; notes before each step which engines rest."""

    def __init__(self, config: Config, *servers: FakeServer) -> None:
        super().__init__(config.controller.address, step_s=0.02)
        self.places = [weights_pb2.Place()]
        self.servers = servers
        self.resting: list[list[bool]] = []
        # Which engines rest while the trainer saves its last version.
        self.resting_at_the_end: list[bool] = []

    async def export(self) -> None:
        self.resting_at_the_end = [server.is_resting for server in self.servers]

    async def train(self) -> None:
        self.resting.append([server.is_resting for server in self.servers])


def config_of(tmp_path: Path, turns: str, **changes: object) -> Config:
    changes |= {"controller__turns": turns}
    if turns == "sleep":
        changes |= {"learner__offload": {"gradients": True, "optimizer": True}}
    return make_config(tmp_path, **changes)


@pytest.mark.parametrize("turns", ["pause", "sleep"])
async def test_no_engine_samples_while_a_step_is_trained_beside_it(
    tmp_path, turns
) -> None:
    config = config_of(tmp_path, turns)
    servers = [
        FakeServer(config.controller.address, f"s{i}", delay_s=0.02) for i in range(2)
    ]
    trainer = TrainerBeside(config, *servers)
    summary = await play(config, *servers, trainer=trainer)
    assert (summary["code"], summary["steps"]) == (0, 12)
    assert trainer.resting[-1] == [True, True]
    # A server that joins in a step has rested in all later ones.
    assert sum(not all(are_resting) for are_resting in trainer.resting) <= 1
    # The last checkpoint takes the memory of the optimizer's state again.
    assert trainer.resting_at_the_end == [turns == "sleep"] * 2
    assert {give_back for server in servers for give_back in server.rests} == {
        turns == "sleep"
    }


@pytest.mark.parametrize("turns", ["pause", "sleep"])
async def test_a_trainer_that_dies_in_a_step_is_followed_by_one_that_goes_on(
    tmp_path, turns
):
    config = config_of(tmp_path, turns)
    server = FakeServer(config.controller.address, "s", delay_s=0.01)
    first = TrainerBeside(config, server)
    second = TrainerBeside(config, server)
    first.hold_at(3)

    async def kill(controller, tasks) -> None:
        training = asyncio.ensure_future(first.run())
        await until(lambda: first.holds)
        assert server.is_resting
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        if turns == "pause":
            await until(lambda: not server.is_resting)
        # The second one starts from the beginning, as a fake without a checkpoint does.
        second_run.set()

    second_run = asyncio.Event()
    start = second.run

    async def later() -> None:
        await second_run.wait()
        await start()

    second.run = later  # type: ignore[method-assign]
    summary = await play(config, server, trainer=second, during=kill)
    assert (summary["code"], summary["steps"]) == (0, 12)
    # Engines that have given their memory to the last checkpoint leave at rest.
    assert server.is_resting is (turns == "sleep")


async def test_a_server_that_dies_at_rest_comes_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sleep")
    first = FakeServer(config.controller.address, "s", delay_s=0.01)
    again = FakeServer(config.controller.address, "s", delay_s=0.01)
    trainer = TrainerBeside(config, first, again)
    trainer.hold_at(3)

    async def kill(controller, tasks) -> None:
        await until(lambda: trainer.holds)
        assert first.is_resting
        first.killed = True
        tasks[0].cancel()
        tasks.append(asyncio.ensure_future(again.run()))
        trainer.gate.set()

    summary = await play(config, first, trainer=trainer, during=kill)
    assert (summary["code"], summary["steps"]) == (0, 12)
    # The engine has served between its first rest, at its start, and the last one, for the last
    # checkpoint.
    assert len(again.rests) > 2
