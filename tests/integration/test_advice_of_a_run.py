"""A whole run with the real controller says where its time goes, and what would gain."""

from __future__ import annotations

import json

import pytest
from slipstream.client.client import Client
from slipstream.client.launch.display import table_rows
from slipstream.client.requests import status_lines
from slipstream.core.advice import profile_from_json
from support.fakes.timed_fleet import Costs, TimedServer, TimedTrainer
from support.rigs.controller_runs import make_config, play
from support.rigs.waiting import until

STEPS = 24
COSTS = Costs(
    engine_step_s=0.001,
    engine_token_s=0.0001,
    training_fixed_s=0.02,
    training_token_s=0.0001,
    publish_s=0.01,
    pause_s=0.005,
    median=20.0,
    longest=56,
)


async def test_a_run_says_what_it_waits_for_and_what_would_gain(tmp_path) -> None:
    config = make_config(tmp_path, run__steps=STEPS, controller__sample_every_steps=4)
    address = config.controller.address
    trainer = TimedTrainer(address, COSTS, replicas=1)
    servers = [TimedServer(address, f"s{k}", COSTS, max_episodes=8) for k in range(2)]
    shown: list[str] = []

    # The last steps wait for the advice, which a busy machine may make late.
    trainer.hold_at(STEPS - 2)

    async def look(controller, tasks) -> None:
        del controller, tasks
        await trainer.until_held()
        await until((config.run_dir / "advice.json").exists)
        trainer.gate.set()
        trainer.hold_at(STEPS - 1)
        await trainer.until_held()
        async with Client(address) as client:
            shown.extend(status_lines(await client.status()))
        trainer.gate.set()

    summary = await play(config, *servers, trainer=trainer, during=look)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]
    assert len(rows) == STEPS
    for row in rows[1:]:
        parts = row["training_s"] + row["groups_wait_s"] + row["publish_s"]
        assert parts <= row["step_s"] * 1.05
    # The times of the costs, and what was measured of them.
    table = json.loads((config.run_dir / "advice.json").read_text())
    profile = profile_from_json(table["profile"])
    assert profile.setting.servers == 2
    assert profile.training_fixed_s == pytest.approx(COSTS.training_fixed_s, rel=0.01)
    assert profile.training_token_s == pytest.approx(COSTS.training_token_s, rel=0.01)
    assert profile.publish_s >= COSTS.publish_s
    assert profile.engine_step_s > 0
    # Everybody tells the same.
    gains = {name.removeprefix("gain/") for name in rows[-1] if name.startswith("gain/")}
    assert {"server_more", "server_less", "rank_more", "staleness_doubled"} <= gains
    assert set(summary["time"]) == {"trainer", "servers"}
    assert summary["advice"]["wanted_servers"] == rows[-1]["wanted_servers"]
    assert {"time of the trainer", "time of the servers", "advice"} <= {
        name for name, _ in table_rows(summary)
    }
    text = "\n".join(shown)
    assert "a step takes" in text
    assert "one rollout server more" in text
    assert "rollout servers wanted:" in text
    # A trace of one of its steps.
    trace = json.loads((config.run_dir / "trace.json").read_text())
    spans = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert f"training of step {trace['otherData']['step']:.0f}" in spans
    assert trace["otherData"]["episodes"] == 16
