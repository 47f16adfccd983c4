"""A rollout server is killed in the middle of a broadcast; what must follow, over any transport."""

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from slipstream.client.launch.children import Child
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config

from benchmarks.common.rig import Placement, Rig

# hung: its engine stops before it takes the first bucket, the kill comes while all wait for it.
# running: it is killed so many seconds after the servers were told to receive.
Moment = Literal["hung"] | float

VICTIM = "server-0"
SURVIVOR = "server-1"
START_LIMIT_S = 300.0
STEP_LIMIT_S = 120.0
LAG_1 = "logprob_gap_lag_1"


@dataclass
class Kill:
    """What followed one kill, in seconds since it."""

    moment: Moment
    # Time at which the trainer reported the broken publish, and the error that it gave.
    freed_s: float
    error: str
    # Times at which the survivor served the weights and the next step was trained.
    survivor_served_s: float
    next_step_s: float
    # Seconds from the victim's new start until the victim served the newest version.
    rejoined_s: float


@dataclass
class Outcome:
    kills: list[Kill] = field(default_factory=list)
    # Log-probability gap of every step: mean and largest; all tokens have lag 0.
    gaps: list[tuple[float, float]] = field(default_factory=list)
    verified: float = 0.0
    probe_gap_max: float = 0.0
    events: list[str] = field(default_factory=list)
    ledger_difference: float = 0.0


def config_of(
    folder: Path, model_folder: Path, transport: str, **sections: dict
) -> Config:
    """Synchronous, so that every trained token tells which weights sampled it; all is verified."""
    table = {
        "run": {"name": "r", "dir": str(folder), "steps": 100_000},
        "model": {"path": str(model_folder), "dtype": "float32"},
        "environments": [
            {
                "name": "replies",
                "reference": "benchmarks.common.workloads:LognormalReplies",
                "args": {"median": 12, "sigma": 0.3, "longest": 24},
            }
        ],
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 4,
            "max_staleness": 0,
            "learning_rate": 1e-3,
        },
        "sampling": {"max_reply_tokens": 24, "max_episode_tokens": 48},
        "debug": {"ignore_eos": True},
        "controller": {"address": f"127.0.0.1:{free_port('127.0.0.1')}"},
        "learner": {"export_final": False},
        "rollout_server": {"max_episodes": 16, "enforce_eager": True},
        "weights": {"transport": transport, "bucket_mib": 1, "verify_every": 1},
    }
    for name, changes in sections.items():
        table[name] = table[name] | changes
    return parse_config(table, source="test")


async def kill_one_of_two(
    config: Config,
    placement: Placement,
    moments: Sequence[Moment],
    *,
    environ: Mapping[str, str] = {},
) -> Outcome:
    """Two servers; at each moment one is killed, the other goes on, and it comes back."""
    outcome = Outcome()
    async with Rig(config, placement, environ=environ) as rig:
        controller = rig.controller
        await rig.start_trainers()
        victim = await rig.start_server(0)
        await rig.start_server(1)
        await rig.until_serving(START_LIMIT_S)
        await steps(rig, 2)
        for moment in moments:
            outcome.kills.append(await kill_and_recover(rig, victim, moment))
            print(outcome.kills[-1], flush=True)
            victim = rig.servers[-1]
        rows = controller.rows
        outcome.gaps = [
            (row["logprob_gap_mean"], row["logprob_gap_max"]) for row in rows
        ]
        assert all(row["logprob_gap_tokens"] == row["trained_tokens"] for row in rows)
        outcome.verified = controller.publish_totals["publishes_verified"]
        outcome.probe_gap_max = controller.publish_totals["probe_gap_max"]
        outcome.ledger_difference = rows[-1]["ledger_difference"]
        outcome.events = controller.events
    return outcome


async def gaps_of_versions(
    config: Config, placement: Placement, number: int
) -> tuple[float, float]:
    """Largest mean gap of tokens of lag 0 in a step, and the median of those of lag 1.

    With the same settings but a bound of 1, so that most tokens are of the version before.
    """
    async with Rig(config, placement) as rig:
        await rig.start_trainers()
        await rig.start_server(0)
        await rig.until_serving(START_LIMIT_S)
        rig.controller.bound(0)
        await steps(rig, 4)
        rig.controller.bound(1)
        await steps(rig, number)
        rows = rig.controller.rows
    right = [row["logprob_gap_mean"] for row in rows if row["logprob_gap_tokens"]]
    wrong = [row[LAG_1] for row in rows if LAG_1 in row]
    assert len(right) >= 3, rows
    print("gaps of the right version", right, "of the one before", wrong, flush=True)
    return max(right), statistics.median(wrong)


async def kill_and_recover(rig: Rig, victim: Child, moment: Moment) -> Kill:
    """Kills `victim`, waits until one server goes on alone, and until the victim serves again."""
    controller = rig.controller
    killed = await kill_while_receiving(rig, victim, moment)
    broken = controller.publishes[-1]
    await rig.until(lambda: broken.sent > 0, "the trainer", STEP_LIMIT_S)
    freed_s = broken.sent - killed
    await rig.until(
        lambda: any(s.name == SURVIVOR and s.is_serving for s in controller.sessions),
        "the survivor",
        STEP_LIMIT_S,
    )
    survivor_served_s = time.monotonic() - killed
    await steps(rig, 1)
    next_step_s = time.monotonic() - killed
    await steps(rig, 2)
    again = time.monotonic()
    await rig.start_server(0)
    await rig.until_serving(START_LIMIT_S)
    rejoined_s = time.monotonic() - again
    await steps(rig, 2)
    return Kill(
        moment, freed_s, broken.error, survivor_served_s, next_step_s, rejoined_s
    )


async def steps(rig: Rig, number: int) -> None:
    expected = len(rig.controller.rows) + number
    await rig.until(
        lambda: len(rig.controller.rows) >= expected, "a step", STEP_LIMIT_S
    )


async def kill_while_receiving(rig: Rig, victim: Child, moment: Moment) -> float:
    """Waits for the next publish to both and kills the first server during it; when that was."""
    has_begun = asyncio.Event()

    def begin() -> None:
        if moment == "hung":
            for process in engine_processes(victim):
                process.suspend()
        has_begun.set()

    rig.controller.publisher.on_start = begin
    async with asyncio.timeout(STEP_LIMIT_S):
        await has_begun.wait()
    rig.controller.publisher.on_start = None
    await asyncio.sleep(0.3 if moment == "hung" else float(moment))
    # The victim ends in a way that `until` would take for a failure.
    rig.servers.remove(victim)
    for process in [psutil.Process(victim.process.pid), *engine_processes(victim)]:
        # Some end with the first one.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    await victim.process.wait()
    return killed


def engine_processes(server: Child) -> list[psutil.Process]:
    """vLLM's processes and environment workers below a rollout server."""
    return psutil.Process(server.process.pid).children(recursive=True)


def check(outcome: Outcome, *, gap_mean: float) -> None:
    """Checks that the learner went on, no server had torn weights, and the dead one came back."""
    for kill in outcome.kills:
        # The trainer's own error may be missing: if the survivor leaves first, NCCL lets the last
        # broadcast of the trainer end as if it had been received.
        assert kill.freed_s > 0, f"the trainer had sent all before the kill: {kill}"
    # Torn weights would sample tokens that the learner finds far less probable than they said.
    assert max(mean for mean, _ in outcome.gaps) <= gap_mean, outcome.gaps
    number = len(outcome.kills)
    assert said(outcome, f"{SURVIVOR} is stale") >= number, outcome.events
    assert said(outcome, f"{VICTIM} is gone") == number, outcome.events
    assert said(outcome, f"{VICTIM} joined") == number + 1, outcome.events
    assert not said(outcome, "probe's log-probabilities differ"), outcome.events
    assert outcome.verified >= len(outcome.gaps)
    assert outcome.ledger_difference == 0


def said(outcome: Outcome, text: str) -> int:
    return sum(text in event for event in outcome.events)
