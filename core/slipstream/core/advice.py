"""Determines what a run waits for, and predicts how much other settings would gain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.step_simulation import Episode, Profile, Setting, Simulated, Simulation

# The metrics of a step that are parts of the trainer's time, in words; other parts have none.
TRAINER_PARTS = {
    "training_s": "training",
    "groups_wait_s": "waiting for groups",
    "publish_s": "publish",
    "checkpoint_s": "checkpoint",
    "export_s": "digests",
}
# The metrics of a step that are the parts of the servers' time.
SERVER_SHARES = ("servers_sampling_share", "servers_paused_share", "servers_idle_share")
# What the next lease waited for in a step, in words; NAME's metric is `lease_wait_NAME_s`.
LEASE_WAITS = {
    "staleness": "a step, by max_staleness",
    "slots": "a free place on a server",
    "server": "a server that serves",
    "environment": "an environment",
    "queue": "room in the queue",
}
# The changes whose gain is predicted, in words; a doubled max_staleness of 0 is 1.
CHANGES = {
    "server_more": "one rollout server more",
    "server_less": "one rollout server less",
    "rank_more": "one data-parallel rank more",
    "rank_less": "one data-parallel rank less",
    "staleness_doubled": "max_staleness doubled",
    "staleness_halved": "max_staleness halved",
    "group_doubled": "group_size doubled",
    "group_halved": "group_size halved",
}
# The trainer counts as waiting for groups above this share of a step.
NEGLIGIBLE = 0.05
# A fleet is large enough if a larger one would gain less than this share of the steps.
ENOUGH = 0.03
# A fleet is advised to grow at most to this many times its measured size.
MOST_GROWTH = 2


@dataclass(frozen=True)
class Alternative:
    """A changed setting, the change's name in `CHANGES`, and the predicted speed and gain."""

    name: str
    setting: Setting
    steps_per_s: float
    # Relative change of the steps per second: 0.1 means 10 % more, a negative number means fewer.
    gain: float


@dataclass(frozen=True)
class Advice:
    """The prediction for the present setting, and the alternatives to it."""

    setting: Setting
    now: Simulated
    alternatives: tuple[Alternative, ...]
    # The smallest number of servers that is fast enough.
    wanted_servers: int

    def predictions(self) -> dict[Setting, float]:
        """Returns the predicted steps per second of each setting, the present one included."""
        others = {each.setting: each.steps_per_s for each in self.alternatives}
        return {**others, self.setting: self.now.steps_per_s}


def alternatives(profile: Profile) -> Iterator[tuple[str, Setting]]:
    """Yields the name in `CHANGES` and the setting of each possible change.

    If servers and trainer share devices, the numbers of servers and ranks are not changed: another
    server would slow the others down.
    """
    now = profile.setting
    staleness, size = now.max_staleness, now.group_size
    if not profile.in_turns:
        yield "server_more", replace(now, servers=now.servers + 1)
        if now.servers > 1:
            yield "server_less", replace(now, servers=now.servers - 1)
        yield "rank_more", replace(now, replicas=now.replicas + 1)
        if now.replicas > 1:
            yield "rank_less", replace(now, replicas=now.replicas - 1)
    yield "staleness_doubled", replace(now, max_staleness=max(1, 2 * staleness))
    if staleness:
        yield "staleness_halved", replace(now, max_staleness=staleness // 2)
    if 2 * size <= profile.places:
        yield "group_doubled", replace(now, group_size=2 * size)
    if size >= 4:
        yield "group_halved", replace(now, group_size=size // 2)


def advise(profile: Profile, is_cancelled: Callable[[], bool] = lambda: False) -> Advice:
    """Predicts the speeds of the present setting and of its alternatives.

    Blocks for some tenths of a second. Raises SimulationCancelled once `is_cancelled` returns true.
    """

    def simulated(setting: Setting) -> Simulated:
        return Simulation(profile, setting).run(is_cancelled)

    now = simulated(profile.setting)
    found = []
    for name, setting in alternatives(profile):
        rate = simulated(setting).steps_per_s
        found.append(Alternative(name, setting, rate, rate / now.steps_per_s - 1))
    return Advice(profile.setting, now, tuple(found), _wanted_servers(profile, now, simulated))


def _wanted_servers(
    profile: Profile, now: Simulated, simulated: Callable[[Setting], Simulated]
) -> int:
    """Returns the smallest number of servers that is predicted to be fast enough.

    A number is fast enough if `MOST_GROWTH` times the present number would gain at most the share
    `ENOUGH` over it. Numbers from 1 / `MOST_GROWTH` to `MOST_GROWTH` times the present one are
    tried, since predictions for others are unreliable. If learner and servers compute in turn, the
    present number is returned.
    """
    present = profile.setting.servers
    if profile.in_turns:
        return present
    rates = {present: now.steps_per_s}

    def rate(servers: int) -> float:
        if servers not in rates:
            setting = replace(profile.setting, servers=servers)
            rates[servers] = simulated(setting).steps_per_s
        return rates[servers]

    most, least = MOST_GROWTH * present, max(1, present // MOST_GROWTH)
    enough = rate(most) / (1 + ENOUGH)
    # The rate grows with the servers, so the smallest number that is enough is found by halving.
    while least < most:
        middle = (least + most) // 2
        if rate(middle) >= enough:
            most = middle
        else:
            least = middle + 1
    return most


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Returns a profile as values of JSON, which `profile_from_json` reads."""
    table = dataclasses.asdict(profile)
    table["groups"] = [[list(episode) for episode in group] for group in profile.groups]
    return table


def profile_from_json(table: Mapping[str, Any]) -> Profile:
    """Returns the profile in a table of `profile_to_json`.

    Raises KeyError, TypeError or ValueError if the table has another form.
    """
    groups = tuple(tuple(Episode(*map(float, e)) for e in group) for group in table["groups"])
    if not groups:
        raise ValueError("a profile needs groups")
    return Profile(**{**table, "setting": Setting(**table["setting"]), "groups": groups})


def waits_for(metrics: Mapping[str, float]) -> str:
    """Returns a sentence that says whether servers or trainer waited in a step, and why.

    `metrics` are the step's metrics. Returns "" if the step's duration or wait for groups is
    missing.
    """
    step_s = metrics.get("step_s", 0.0)
    if not step_s or "groups_wait_s" not in metrics:
        return ""
    share = metrics["groups_wait_s"] / step_s
    causes = {name: metrics.get(f"lease_wait_{name}_s", 0.0) for name in LEASE_WAITS}
    cause = max(causes, key=lambda name: causes[name])
    if share < NEGLIGIBLE:
        return "the servers wait for the trainer" if cause == "staleness" else "no fleet waits"
    if not causes[cause]:
        return "the trainer waits for groups"
    if cause == "slots":
        return "the trainer waits for the servers, which are full"
    if cause == "staleness":
        return "the trainer waits for long replies; new ones wait for a step, by max_staleness"
    return f"the trainer waits for groups, and new ones for {LEASE_WAITS[cause]}"
