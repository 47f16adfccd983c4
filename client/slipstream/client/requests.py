"""Implements the commands that ask a running controller for something and print its answers."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence

from slipstream.client.client import Client
from slipstream.client.run_folder import FoundRun, find_run
from slipstream.client.status import (
    EnvironmentStatus,
    RunStatus,
    ServerStatus,
    episodes_under_way,
    fates,
)
from slipstream.client.terminal import aligned, counted, say
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.run_folder import LEASE_WAITS, SERVER_SHARES, TRAINER_PARTS

CREDENTIALS = ("token_file", "tls_ca", "tls_certificate", "tls_key")
# States of a server that a scheduler should not restart.
WORKING = ("loading", "serving", "draining")
_RATE = "pass_at_"
# Counts of the episodes of a round, without their prefix `num_`.
_COUNTS = ("episodes", "failed")
# The trainer counts as waiting for groups above this share of a step.
NEGLIGIBLE = 0.05
# Most names of servers in one line.
_MOST_NAMES = 4


def connect(arguments: argparse.Namespace) -> Client:
    """Returns the client for a command's run, found by its folder, or for a stated controller."""
    if arguments.controller is not None and arguments.run is not None:
        raise ConfigError(f"give --controller or the run {arguments.run}, not both")
    at = arguments.controller
    found_run = find_run(arguments.run) if at is None else FoundRun(at)
    files = {name: getattr(arguments, name) for name in CREDENTIALS}
    stated = {name: file for name, file in files.items() if file is not None}
    security = found_run.security.model_copy(update=stated)
    return Client.of_run(dataclasses.replace(found_run, security=security))


async def submit(arguments: argparse.Namespace) -> int:
    """Runs `slipstream submit`: adds an environment to the run and prints its state; returns 0."""
    try:
        args = json.loads(arguments.args)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--args must be a JSON object: {error}") from error
    async with connect(arguments) as client:
        status = await client.submit(
            arguments.reference,
            name=arguments.name,
            args=args,
            weight=arguments.weight,
            timeout_s=arguments.timeout_s,
            num_workers=arguments.num_workers,
            python=arguments.python,
            adapter=arguments.adapter,
        )
    tasks = counted(status.num_tasks, "task") if status.num_tasks else "tasks without end"
    detail = tasks if status.state == "ready" else "it waits for a rollout server"
    say(f"environment {status.name} is {status.state}: {detail}")
    module = arguments.reference.partition(":")[0]
    say(f"no code was sent: servers load {module} on their own machines")
    return 0


async def status(arguments: argparse.Namespace) -> int:
    """Prints the status; for a server's id raises RunFailed if that server does not work.

    With other settings prints what the run would do, by its files alone.
    """
    if arguments.changes:
        from slipstream.client.launch.rollouts import predict

        return await predict(arguments)
    async with connect(arguments) as client:
        run = await client.status()
    if arguments.server_id is not None:
        if fault := find_fault(run, arguments.server_id):
            raise RunFailed(fault)
        return 0
    if arguments.json:
        say(json.dumps(dataclasses.asdict(run), indent=2))
    else:
        say("\n".join(status_lines(run)))
    return 0


async def stop(arguments: argparse.Namespace) -> int:
    """Runs `slipstream stop`: asks the run to stop after the current step; returns 0."""
    async with connect(arguments) as client:
        run = await client.status()
        await client.stop(arguments.reason)
    say(f"run {run.run_id} stops after the step that is under way")
    return 0


async def drain(arguments: argparse.Namespace) -> int:
    """Runs `slipstream drain`: asks a rollout server to drain; returns 0."""
    async with connect(arguments) as client:
        warning = await client.drain(arguments.server_id, arguments.reason)
    say(f"rollout server {arguments.server_id} drains")
    if warning:
        say(f"! {warning}")
    return 0


def find_fault(run: RunStatus, server_id: str) -> str | None:
    """Returns the fault of the run or of server `server_id` as text, or None if there is none."""
    if run.state == "failed":
        return f"run {run.run_id} failed: {run.cause}"
    states = [server.state for server in run.servers if server.server_id == server_id]
    if not states:
        return f"the controller does not know rollout server {server_id}"
    # A server that came back has an entry for each of its epochs.
    if set(states).isdisjoint(WORKING):
        return f"rollout server {server_id} is not there to work: {states[-1]}"
    return None


def status_lines(run: RunStatus) -> list[str]:
    """Returns the lines of text that show the state of a run."""
    lines = [f"run {run.run_id} is {run.state}" + (f": {run.cause}" if run.cause else "")]
    reward = f"reward {run.metrics['reward_mean']:.3f}, " if "reward_mean" in run.metrics else ""
    lines.append(f"{reward}version {run.step} of {run.num_steps}, up for {run.uptime_s:.0f} s")
    if run.waiting_for:
        lines.append(f"waits for {run.waiting_for}")
    if under_way := episodes_under_way(run):
        lines.append(under_way)
    if run.lease_wait:
        lines.append(f"the next lease waits for {run.lease_wait}")
    if "passes" in run.metrics:
        lines.append(f"passes of the newest step: {run.metrics['passes']:.0f}")
    lines.append(
        f"{run.leased_groups} groups leased, {run.complete_groups} of them complete, "
        f"{run.queued_bytes:,} bytes queued, {run.reserved_bytes:,} reserved, "
        f"max_staleness {run.max_staleness}"
    )
    lines.append(f"generated tokens: {fates(dataclasses.asdict(run.ledger))}")
    lines += [f"the ledger is open, {gap}" for gap in run.ledger.gaps]
    rows = [("server", "state", "version", "groups", "episodes", "generated", "drafts", "cause")]
    rows += [
        (
            server.server_id,
            server.state,
            "-" if server.state == "joining" else str(server.version),
            str(server.leased_groups),
            str(server.open_episodes),
            f"{server.generated_tokens:,}",
            f"{server.accepted_tokens / server.drafted_tokens:.0%} accepted"
            if server.drafted_tokens
            else "-",
            server.cause,
        )
        for server in run.servers
    ]
    times = time_lines(run.metrics)
    lines += ["", *times] if times else []
    lines += ["", *aligned(rows), *disabled_feature_lines(run.servers)]
    return [*lines, "", *environment_lines(run.environments)]


def disabled_feature_lines(servers: Sequence[ServerStatus]) -> list[str]:
    """Returns a line for each feature that engines do without for the same cause."""
    names_by_cause: dict[tuple[str, str], list[str]] = {}
    for server in servers:
        if server.state in WORKING:
            for feature in server.disabled_features.items():
                names_by_cause.setdefault(feature, []).append(server.server_id)
    return [
        f"{feature} is off on {', '.join(names[:_MOST_NAMES])}"
        + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
        + f": {cause}"
        for (feature, cause), names in sorted(names_by_cause.items())
    ]


def time_lines(metrics: Mapping[str, float]) -> list[str]:
    """Returns lines on how the newest step spent its time, or [] before the first step."""
    step_s = metrics.get("step_s", 0.0)
    if not step_s or "groups_wait_s" not in metrics:
        return []
    # The steps of a client's own loop have no rewards.
    whom = "groups" if "reward_mean" in metrics else "the client"
    parts = {
        words.replace("groups", whom): metrics.get(name, 0.0)
        for name, words in TRAINER_PARTS.items()
    }
    parts["other"] = max(0.0, step_s - sum(parts.values()))
    causes = {name: metrics.get(f"lease_wait_{name}_s", 0.0) for name in LEASE_WAITS}
    cause = max(causes, key=lambda name: causes[name])
    if metrics["groups_wait_s"] / step_s < NEGLIGIBLE:
        waits = "the servers wait for the trainer" if cause == "staleness" else "nobody waits long"
    elif not causes[cause]:
        waits = f"the trainer waits for {whom}"
    elif cause == "slots":
        waits = "the trainer waits for the servers, which are full"
    elif cause == "staleness":
        waits = "the trainer waits for long replies; new ones wait for a step, by max_staleness"
    else:
        waits = f"the trainer waits for groups, and new ones for {LEASE_WAITS[cause]}"
    lines = [f"a step takes {step_s:.2f} s: {waits}", f"  trainer: {_shares(parts, step_s)}"]
    if SERVER_SHARES[0] in metrics:
        servers = {name.split("_")[1]: metrics[name] for name in SERVER_SHARES}
        lines.append(f"  servers: {_shares(servers, 1.0)}")
    if any(causes.values()):
        named_waits = {LEASE_WAITS[name]: wait_s for name, wait_s in causes.items()}
        lines.append(f"  the next lease waits for {_shares(named_waits, step_s)}")
    waited = metrics.get("queue_s_mean")
    if waited is not None:
        lines.append(f"  queue: a complete group waits {waited:.2f} s for its step")
    episode = {
        "engine": metrics.get("generation_s_mean", 0.0),
        "environment": metrics.get("environment_s_mean", 0.0),
        "rest": metrics.get("episode_rest_s_mean", 0.0),
    }
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in episode.items())
    return [*lines, f"  episode: {times}"]


def _shares(parts: Mapping[str, float], total: float) -> str:
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value)


def environment_lines(entries: Sequence[EnvironmentStatus]) -> list[str]:
    """Returns the lines of text on environments, and on evaluations with their newest results."""
    trained = [entry for entry in entries if entry.purpose != "evaluation"]
    evaluations = [entry for entry in entries if entry.purpose == "evaluation"]
    rows = [("environment", "state", "tasks", "weight", "accepted", "failed", "reward", "cause")]
    rows += [
        (
            entry.name,
            entry.state,
            _tasks(entry),
            f"{entry.weight:g}",
            f"{entry.groups_accepted:,}",
            f"{entry.groups_failed:,}",
            f"{entry.reward_mean:.3f}" if entry.groups_accepted else "-",
            entry.cause,
        )
        for entry in trained
    ]
    if not evaluations:
        return aligned(rows)
    lines = [*aligned(rows), ""] if trained else []
    results = {e.name: e.newest_round.numbers if e.newest_round else {} for e in evaluations}
    rates = {name for numbers in results.values() for name in numbers if name.startswith(_RATE)}
    columns = sorted(rates, key=lambda name: int(name.removeprefix(_RATE)))
    passes = [f"pass@{name.removeprefix(_RATE)}" for name in columns]
    table = [("evaluation", "state", "tasks", "version", "reward", *passes, *_COUNTS, "cause")]
    for entry in evaluations:
        numbers = results[entry.name]
        measured = [f"{numbers[k]:.3f}" if k in numbers else "-" for k in ("reward_mean", *columns)]
        counts = [f"{numbers[f'num_{k}']:,.0f}" if numbers else "-" for k in _COUNTS]
        version = str(entry.newest_round.step) if entry.newest_round else "-"
        start = (entry.name, entry.state, _tasks(entry), version)
        table.append((*start, *measured, *counts, entry.cause))
    return [*lines, *aligned(table)]


def _tasks(entry: EnvironmentStatus) -> str:
    if entry.state == "pending":
        return "-"
    return f"{entry.num_tasks:,}" if entry.num_tasks else "no end"
