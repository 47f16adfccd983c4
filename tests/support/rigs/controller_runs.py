"""Whole runs of the real controller, with servers and a trainer that compute nothing."""

import asyncio
import json

from slipstream.client.run_folder import write_config
from slipstream.client.verify import examine
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.learner.controller.application import Controller

from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import OPEN, RUN_ID
from support.rigs.run_processes import rows_of


def make_config(tmp_path, *evaluations: dict, **changes) -> Config:
    """Settings of a small run; a key SECTION__NAME among `changes` is another value of one."""
    table = {
        "run": {"name": "r", "id": RUN_ID, "steps": 12, "dir": str(tmp_path)},
        "model": {"path": "nowhere"},
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 4,
            "max_staleness": 2,
            "learning_rate": 1e-3,
        },
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 64},
        "controller": {
            "address": f"127.0.0.1:{free_port('127.0.0.1')}",
            # Copying a run, or a busy machine, takes the event loop's time.
            "heartbeat_timeout_s": 30.0,
        },
        "environments": [{"name": "e", "reference": "m:E"}],
    }
    for key, value in changes.items():
        section, name = key.split("__")
        table.setdefault(section, {})[name] = value
    if changes.get("controller__client_loop"):
        del table["environments"]
    table["evaluations"] = [
        {"reference": "m:E", **settings} for settings in evaluations
    ]
    return parse_config(table, source="test")


async def play(
    config: Config,
    *servers: FakeServer,
    trainer: FakeTrainer | None = None,
    during=None,
    wait_for_trainer: bool = True,
    is_planted: bool = False,
    is_damaged: bool = False,
) -> dict:
    """Runs a whole run with fakes; returns its summary, with the texts of its events.

    Without a server or a trainer there is a plain one. The ledger must close at every hand-over,
    unless a fault `is_planted` there, and the run's files must pass what `slipstream verify` does,
    whose tests are in test_verify.py, unless a file `is_damaged`.
    """
    controller = Controller(config, OPEN)
    servers = servers or (FakeServer(config.controller.address),)
    trainer = trainer or FakeTrainer(config.controller.address)
    async with asyncio.timeout(200):
        tasks = [asyncio.ensure_future(s.run()) for s in servers]
        training = asyncio.ensure_future(trainer.run())
        running = asyncio.ensure_future(controller.run())
        try:
            if during is not None:
                await during(controller, tasks)
            code = await running
            if wait_for_trainer:
                await training
        finally:
            for task in (*tasks, training, running):
                task.cancel()
            await asyncio.gather(*tasks, training, running, return_exceptions=True)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert is_planted or summary["ledger"]["gaps"] == []
    if not is_planted and not is_damaged:
        write_config(config, config.run_dir)
        faults = examine(config.run_dir).faults
        assert faults == [], faults
    messages = [event.text for event in controller._run.events.kept()]
    return summary | {"code": code, "told": messages}


def evaluation_rows(config: Config) -> list[dict]:
    return [row for row in rows_of(config.run_dir) if "evaluation_step" in row]
