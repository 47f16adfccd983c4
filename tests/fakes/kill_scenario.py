"""A rollout server is killed in the middle of a broadcast; what must follow, over any transport."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from rig import Placement, Rig
from slipstream.client.children import Child
from slipstream.client.preflight import free_port
from slipstream.protocol.config import Config
from slipstream.protocol.config_file import parse_config

# hung: its engine stops before it takes the first bucket, the kill comes while all wait for it.
# running: it is killed so many seconds after the servers were told to receive.
Moment = Literal["hung"] | float

VICTIM, SURVIVOR = "server-0", "server-1"
START_LIMIT_S = 300.0
STEP_LIMIT_S = 120.0


@dataclass
class Outcome:
    """What happened, in seconds since the kill."""

    # The trainer was rid of the broken publish; it said why.
    freed_s: float = 0.0
    error: str = ""
    # The survivor had the weights, and a step was trained.
    survivor_served_s: float = 0.0
    next_step_s: float = 0.0
    # The victim, started again, served the newest version.
    rejoined_s: float = 0.0
    # Log-probability gap of every step: mean and largest; all tokens have lag 0.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    verified: int = 0
    probe_gap_max: float = 0.0
    events: list[str] = field(default_factory=list)
    ledger_difference: float = 0.0


def config_of(folder: Path, model: Path, transport: str, **sections: dict) -> Config:
    """Synchronous, so that every trained token tells which weights sampled it; all is verified."""
    table = {
        "run": {"name": "r", "dir": str(folder), "steps": 100_000},
        "model": {"path": str(model), "dtype": "float32"},
        "environments": [
            {
                "name": "replies",
                "reference": "workloads:LognormalReplies",
                "args": {"median": 12, "sigma": 0.3, "longest": 24},
            }
        ],
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 4,
            "max_staleness": 0,
            "learning_rate": 1e-3,
        },
        "sampling": {"max_reply_tokens": 24, "max_episode_tokens": 48, "ignore_eos": True},
        "controller": {"address": f"127.0.0.1:{free_port('127.0.0.1')}"},
        "learner": {"export_final": False},
        "rollout_server": {"max_episodes": 16, "enforce_eager": True},
        "weights": {"transport": transport, "bucket_mib": 1, "verify_every": 1},
    }
    for name, changes in sections.items():
        table[name] = table[name] | changes
    return parse_config(table, source="test")


async def kill_one_of_two(
    config: Config, placement: Placement, moment: Moment, *, environ: dict[str, str]
) -> Outcome:
    """The whole story: two servers, a kill, one server, two servers again."""
    outcome = Outcome()
    async with Rig(config, placement, environ=environ) as rig:
        controller = rig.controller
        await rig.start_trainers()
        victim = await rig.start_server(0)
        await rig.start_server(1)
        await rig.until_serving(START_LIMIT_S)
        await steps(rig, 2)
        killed = await kill_while_receiving(rig, victim, moment)
        broken = controller.publishes[-1]
        await rig.until(lambda: broken.sent > 0, "the trainer", STEP_LIMIT_S)
        outcome.freed_s, outcome.error = broken.sent - killed, broken.error
        await rig.until(
            lambda: any(s.name == SURVIVOR and s.is_serving for s in controller.sessions),
            "the survivor",
            STEP_LIMIT_S,
        )
        outcome.survivor_served_s = time.monotonic() - killed
        await steps(rig, 1)
        outcome.next_step_s = time.monotonic() - killed
        await steps(rig, 2)
        again = time.monotonic()
        await rig.start_server(0)
        await rig.until_serving(START_LIMIT_S)
        outcome.rejoined_s = time.monotonic() - again
        await steps(rig, 2)
        rows = controller.rows
        outcome.gaps = [(row["logprob_gap_mean"], row["logprob_gap_max"]) for row in rows]
        assert all(row["logprob_gap_tokens"] == row["trained_tokens"] for row in rows)
        outcome.verified = controller.publish_totals["publishes_verified"]
        outcome.probe_gap_max = controller.publish_totals["probe_gap_max"]
        outcome.ledger_difference = rows[-1]["ledger_difference"]
        outcome.events = controller.events
    return outcome


async def steps(rig: Rig, number: int) -> None:
    wanted = len(rig.controller.rows) + number
    await rig.until(lambda: len(rig.controller.rows) >= wanted, "a step", STEP_LIMIT_S)


async def kill_while_receiving(rig: Rig, victim: Child, moment: Moment) -> float:
    """Waits for the next publish to both and kills the first server during it; when that was."""
    begun = asyncio.Event()

    def begin() -> None:
        if moment == "hung":
            for process in engine_processes(victim):
                process.suspend()
        begun.set()

    rig.controller.on_start = begin
    async with asyncio.timeout(STEP_LIMIT_S):
        await begun.wait()
    rig.controller.on_start = None
    await asyncio.sleep(0.3 if moment == "hung" else float(moment))
    # It ends in a way that `until` would take for a failure.
    rig.servers.remove(victim)
    for process in [psutil.Process(victim.process.pid), *engine_processes(victim)]:
        os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    await victim.process.wait()
    return killed


def engine_processes(server: Child) -> list[psutil.Process]:
    """vLLM's processes and environment workers below a rollout server."""
    return psutil.Process(server.process.pid).children(recursive=True)


def check(outcome: Outcome, *, gap_mean: float) -> None:
    """The learner went on, nobody served torn weights, the dead one came back."""
    assert outcome.error, "the broadcast was over before the kill"
    assert outcome.freed_s <= 5.0, outcome
    # Torn weights would sample tokens that the learner finds far less probable than they said.
    assert max(mean for mean, _ in outcome.gaps) <= gap_mean, outcome.gaps
    assert any(f"{SURVIVOR} is stale" in text for text in outcome.events), outcome.events
    assert any(f"{VICTIM} is gone" in text for text in outcome.events), outcome.events
    assert sum(f"{VICTIM} joined" in text for text in outcome.events) == 2
    assert not any("probe's log-probabilities differ" in text for text in outcome.events)
    assert outcome.verified >= len(outcome.gaps)
    assert outcome.ledger_difference == 0
