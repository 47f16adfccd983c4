"""Simulates a run to predict the seconds of a step; equal inputs give equal results.

No formula covers long-tailed replies and whole groups, since a step waits for the slowest member of
the groups that are due. So the simulation leases groups by the functions of `staleness` to engines
whose step takes `step_s + token_s * n` seconds with n running replies.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.core import staleness

# Most members of a group that are simulated one by one; in a larger group several end together.
MOST_MEMBERS = 8
# Most groups of a step and most engines that are simulated. In a larger run each step has fewer
# groups, and an engine stands for several servers.
MOST_GROUPS, MOST_ENGINES = 64, 8
# Least number of counted steps; more steps are counted until they have ENOUGH_EPISODES episodes.
LEAST_STEPS, ENOUGH_EPISODES = 24, 4096


class Episode(NamedTuple):
    """The measured work of one episode."""

    # Tokens that the engine samples.
    sampled: float
    # Tokens that the trainer computes, context included.
    trained: float
    # Seconds outside the engine: in the environment, waiting for a place, in transfer.
    outside_s: float


Group = tuple[Episode, ...]


@dataclass(frozen=True)
class Setting:
    """The settings of a simulated run that an operator may change."""

    servers: int
    replicas: int
    max_staleness: int
    group_size: int


@dataclass(frozen=True)
class Profile:
    """The speeds and times that a run measured under one setting, for predictions."""

    setting: Setting
    groups_per_step: int
    # Most concurrent episodes of a server.
    places: int
    # An engine's step takes `engine_step_s + engine_token_s * n` with n running replies.
    engine_step_s: float
    engine_token_s: float
    # A step of the trainer: a fixed part, and a part for each token that replicas share.
    training_fixed_s: float
    training_token_s: float
    # `publish_s`: seconds from the end of training until servers sample with the new weights.
    # `order_s`: seconds from there to the next training if its batch is complete.
    # `pause_s`: the last seconds of `publish_s`, in which generation is paused.
    publish_s: float
    order_s: float
    pause_s: float
    groups: tuple[Group, ...]
    # Last seconds of `order_s`, in which engines are already paused. They stay paused until the new
    # weights serve. None means that engines sample while the learner trains.
    resting_order_s: float | None = None

    @property
    def in_turns(self) -> bool:
        """Whether rollout servers and trainer compute in turn, on the same devices."""
        return self.resting_order_s is not None

    def training_s(self, tokens: float, replicas: int) -> float:
        """Returns the seconds of a training step of `tokens` tokens on `replicas` replicas."""
        share = self.setting.replicas / replicas
        return self.training_fixed_s + self.training_token_s * tokens * share


@dataclass(frozen=True)
class Simulated:
    """Means over the simulated steps after the warm-up."""

    step_s: float
    # Share of the time in which the trainer waits for groups.
    waiting_share: float
    # Share of the servers' places that are taken.
    places_share: float

    @property
    def steps_per_s(self) -> float:
        """The number of steps in a second."""
        return 1 / self.step_s


def resized(groups: Sequence[Group], size: int) -> list[Group]:
    """Returns one group of `size` members for each of `groups`, ordered by mean sampled tokens.

    The spread within groups and between them is kept. A group that shrinks keeps evenly spaced
    members. A group that grows adds members of the groups with the nearest means, so that its
    longest reply is typical of its new size.
    """
    ordered = sorted(groups, key=lambda group: sum(e.sampled for e in group) / len(group))
    found = []
    for place in range(len(ordered)):
        pool: list[Episode] = []
        for number in range(len(ordered)):
            # The group itself, then its neighbours on both sides in turn.
            offset = (number + 1) // 2 * (1 if number % 2 else -1)
            pool += ordered[(place + offset) % len(ordered)]
            if len(pool) >= size:
                break
        # Evenly spaced members of a sorted group keep its spread.
        stride = len(pool) / size
        pool = sorted(pool) if len(pool) > size else pool
        found.append(tuple(pool[int((k + 0.5) * stride)] for k in range(size)))
    return found


@dataclass
class _Engine:
    # Steps that the engine has made, and the time of that count.
    made: float = 0.0
    at_s: float = 0.0
    # Replies that run; `ends` has (engine's step, number, members, group, seconds outside).
    running: int = 0
    free: int = 0
    ends: list[tuple[float, int, int, _Leased, float]] = field(default_factory=list)
    # Counts changes, so that an event of an earlier state is known as such.
    state: int = 0


@dataclass
class _Leased:
    deadline: int
    tokens: float
    open: int


class SimulationCancelled(Exception):
    """A simulation stopped because the caller's `is_cancelled` returned true."""


class Simulation:
    """A simulation of one run under one setting; `run` returns the means over its steps.

    The trainer waits for a batch, trains, publishes, and waits again.
    """

    def __init__(self, profile: Profile, setting: Setting) -> None:
        self._profile, self._setting = profile, setting
        size = setting.group_size
        groups = profile.groups
        if any(len(group) != size for group in groups):
            groups = tuple(resized(groups, size))
        self._parts = [_parts(group) for group in groups]
        # Each group comes once before any comes again: the same work under every setting.
        self._next: list[int] = []
        self._drawn = random.Random(0)
        self._batch = min(profile.groups_per_step, MOST_GROUPS)
        servers = setting.servers * self._batch / profile.groups_per_step
        number = max(1, min(MOST_ENGINES, int(servers)))
        # Servers that an engine stands for.
        self._each = servers / number
        self._places = max(int(profile.places * self._each), size)
        self._engines = [_Engine(free=self._places) for _ in range(number)]
        self._now_s, self._step, self._version = 0.0, 0, 0
        self._counts: Counter[int] = Counter()
        self._complete: Counter[int] = Counter()
        self._tokens: dict[int, deque[float]] = {}
        # (time, number, kind, engine, state, members, group)
        self._events: list[tuple[float, int, str, int, int, int, _Leased | None]] = []
        self._number = 0
        self._waiting_since_s: float | None = 0.0
        self._waited_s = self._place_s = 0.0
        self._taken, self._taken_at_s = 0, 0.0
        self._is_paused = False
        # Time, waited seconds and place seconds at the end of each step.
        self._ends: list[tuple[float, float, float]] = []

    def run(self, is_cancelled: Callable[[], bool] = lambda: False) -> Simulated:
        """Simulates the run, and returns means over the steps after a warm-up.

        Raises ValueError if a group does not fit on a server, and SimulationCancelled as soon as
        `is_cancelled`, which is called before each event, returns true.
        """
        if self._profile.places < self._setting.group_size:
            raise ValueError("a group must fit into the places of a server")
        warmup = 2 * (self._setting.max_staleness + 1)
        episodes = self._batch * min(self._setting.group_size, MOST_MEMBERS)
        # Waits for long replies repeat every `max_staleness + 1` steps; several periods count.
        counted = max(LEAST_STEPS, 2 * warmup, ENOUGH_EPISODES // episodes)
        self._lease()
        while len(self._ends) <= warmup + counted:
            if is_cancelled():
                raise SimulationCancelled
            self._advance()
        first, last = self._ends[warmup], self._ends[warmup + counted]
        wall_s = last[0] - first[0]
        places = len(self._engines) * self._places
        return Simulated(
            step_s=wall_s / counted,
            waiting_share=(last[1] - first[1]) / wall_s,
            places_share=(last[2] - first[2]) / (wall_s * places),
        )

    def _advance(self) -> None:
        at_s, _, kind, place, state, members, group = heapq.heappop(self._events)
        if kind == "engine" and self._engines[place].state != state:
            return
        self._now_s = at_s
        if kind == "engine":
            self._end_replies(place)
        elif kind == "outside":
            assert group is not None
            self._end_members(place, members, group)
        elif kind == "pause":
            self._pause(paused=True)
        elif kind == "trained":
            self._publish()
        else:
            self._serve()

    def _publish(self) -> None:
        profile = self._profile
        pause_s = min(profile.pause_s, profile.publish_s)
        self._add(self._now_s + profile.publish_s - pause_s, "pause")
        self._add(self._now_s + profile.publish_s, "served")

    def _serve(self) -> None:
        """Ends a publish: servers sample with the new version, and the trainer waits for groups."""
        self._pause(paused=False)
        self._version += 1
        self._note_places()
        self._ends.append((self._now_s, self._waited_s, self._place_s))
        self._waiting_since_s = self._now_s
        self._form()
        self._lease()

    def _form(self) -> None:
        if self._waiting_since_s is None:
            return
        chosen = staleness.choose_counted(self._counts, self._complete, self._step, self._batch)
        if chosen is None:
            return
        tokens = 0.0
        for deadline, number in chosen.items():
            self._counts[deadline] -= number
            self._complete[deadline] -= number
            tokens += sum(self._tokens[deadline].popleft() for _ in range(number))
            if not self._complete[deadline]:
                del self._complete[deadline]
            if not self._counts[deadline]:
                del self._counts[deadline]
        self._step += 1
        self._waited_s += self._now_s - self._waiting_since_s
        self._waiting_since_s = None
        if (resting_s := self._profile.resting_order_s) is not None:
            self._add(self._now_s + self._profile.order_s - resting_s, "pause")
        tokens *= self._profile.groups_per_step / self._batch
        training_s = self._profile.training_s(tokens, self._setting.replicas)
        self._add(self._now_s + self._profile.order_s + training_s, "trained")

    def _lease(self) -> None:
        size = self._setting.group_size
        deadline = staleness.deadline(self._version, self._setting.max_staleness, 1 << 60)
        while True:
            place = max(range(len(self._engines)), key=lambda k: self._engines[k].free)
            engine = self._engines[place]
            if engine.free < size or not staleness.may_lease_counted(
                self._counts, self._step, self._batch, deadline
            ):
                return
            if not self._next:
                self._next = self._drawn.sample(range(len(self._parts)), len(self._parts))
            tokens, parts = self._parts[self._next.pop()]
            group = _Leased(deadline, tokens, size)
            self._counts[deadline] += 1
            self._note_places()
            self._taken += size
            engine.free -= size
            self._settle(engine)
            engine.running += size
            for sampled, members, outside_s in parts:
                self._number += 1
                item = (engine.made + sampled, self._number, members, group, outside_s)
                heapq.heappush(engine.ends, item)
            self._schedule(place)

    def _end_replies(self, place: int) -> None:
        engine = self._engines[place]
        self._settle(engine)
        made = engine.ends[0][0]
        engine.made = made
        while engine.ends and engine.ends[0][0] <= made:
            _, _, members, group, outside_s = heapq.heappop(engine.ends)
            engine.running -= members
            if outside_s > 0:
                self._add(self._now_s + outside_s, "outside", place, 0, members, group)
            else:
                self._end_members(place, members, group)
        self._schedule(place)

    def _end_members(self, place: int, members: int, group: _Leased) -> None:
        self._note_places()
        self._taken -= members
        self._engines[place].free += members
        group.open -= members
        if not group.open:
            self._complete[group.deadline] += 1
            self._tokens.setdefault(group.deadline, deque()).append(group.tokens)
            self._form()
        if self._engines[place].free >= self._setting.group_size:
            self._lease()

    def _pause(self, *, paused: bool) -> None:
        for engine in self._engines:
            self._settle(engine)
        self._is_paused = paused
        for place in range(len(self._engines)):
            self._schedule(place)

    def _settle(self, engine: _Engine) -> None:
        """Advances an engine's number of steps to the current simulated time."""
        if engine.running and not self._is_paused:
            engine.made += (self._now_s - engine.at_s) / self._engine_s(engine.running)
        engine.at_s = self._now_s

    def _schedule(self, place: int) -> None:
        """Schedules the end of an engine's next reply, and cancels the one scheduled before."""
        engine = self._engines[place]
        engine.state += 1
        if engine.ends and not self._is_paused:
            left = max(engine.ends[0][0] - engine.made, 0.0)
            at_s = self._now_s + left * self._engine_s(engine.running)
            self._add(at_s, "engine", place, engine.state)

    def _engine_s(self, running: int) -> float:
        return self._profile.engine_step_s + self._profile.engine_token_s * running / self._each

    def _note_places(self) -> None:
        self._place_s += self._taken * (self._now_s - self._taken_at_s)
        self._taken_at_s = self._now_s

    def _add(
        self,
        at_s: float,
        kind: str,
        place: int = 0,
        state: int = 0,
        members: int = 0,
        group: _Leased | None = None,
    ) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, kind, place, state, members, group))


def _parts(group: Group) -> tuple[float, list[tuple[float, int, float]]]:
    """Returns a group's trained tokens, and (sampled tokens, members, `outside_s`) of each part.

    Each member is a part. In a group of more than `MOST_MEMBERS` members only the longest is a part
    of its own; every other part stands for several members and has the means of their values.
    """
    tokens = sum(episode.trained for episode in group)
    ordered = sorted(group)
    if len(ordered) <= MOST_MEMBERS:
        return tokens, [(e.sampled, 1, e.outside_s) for e in ordered]
    *others, last = ordered
    parts = [(last.sampled, 1, last.outside_s)]
    size = math.ceil(len(others) / (MOST_MEMBERS - 1))
    for start in range(0, len(others), size):
        part = others[start : start + size]
        sampled = sum(episode.sampled for episode in part) / len(part)
        outside_s = sum(episode.outside_s for episode in part) / len(part)
        parts.append((sampled, len(part), outside_s))
    return tokens, parts
