"""Measures the profile of a run, predicts its speed under other settings, and checks predictions.

Consumes: the reports of servers, the steps. Produces: advice on settings, as metrics and a file.
Waits for: steps. Unblocked by: enough new steps. Predictions are computed in a thread, which ends
with the task that waits for it, and take at most a hundredth of a core.
"""

import asyncio
import json
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue
from slipstream.core.advice import CHANGES, Advice, advise, profile_to_json
from slipstream.core.step_simulation import Episode, Group, Profile, Setting
from slipstream.learner.controller.leasing.groups import Group as LeasedGroup
from slipstream.learner.controller.reporting.step_times import ServerWork, outside_s

# Steps between two predictions, and number of steps over which costs are averaged.
EVERY_STEPS = 10
WINDOW_STEPS = 40
# Time between two predictions, in units of the processor time that the last one took.
PAUSE = 100.0
# Groups and server reports from which the model takes lengths and speeds.
MOST_EPISODES, LEAST_GROUPS = 4096, 32
MOST_REPORTS = 1024
# Relative spread of running replies below which their cost is not separable from a step's.
LEAST_SPREAD = 0.05
# Least duration of an engine step; with 0 s the model would make endless steps.
LEAST_STEP_S = 1e-6
# Errors that a prediction from impossible figures may raise.
FAULTS = (ArithmeticError, AssertionError, LookupError, ValueError)


@dataclass(frozen=True)
class StepCosts:
    """The times and tokens of one step, as the trainer measured them."""

    setting: Setting
    step_s: float
    waited_s: float
    training_s: float
    # The part of training that grows with the tokens.
    computing_s: float
    publish_s: float
    pause_s: float
    tokens: float


def engine_costs(work: Sequence[ServerWork]) -> tuple[float, float] | None:
    """Returns the fixed seconds of an engine step, and the seconds that each running reply adds.

    Both are at least 0. They are a least-squares fit of the reports' sampling seconds to their
    steps and tokens. If the number of running replies varies little, all seconds count as fixed.
    Returns None if no tokens were generated.
    """
    points = [(w.sampling_s, w.engine_steps, w.generated_tokens) for w in work if w.engine_steps]
    steps, tokens = sum(n for _, n, _ in points), sum(t for _, _, t in points)
    # Probes make engine steps whose tokens do not count.
    if not steps or not tokens:
        return None
    seconds = sum(s for s, _, _ in points)
    mean = tokens / steps
    # Weighted by steps: the error of a report's seconds grows with their number.
    spread = sum(n * (t / n - mean) ** 2 for _, n, t in points) / steps
    if spread < (LEAST_SPREAD * mean) ** 2:
        return seconds / steps, 0.0
    common = sum(n * (s / n - seconds / steps) * (t / n - mean) for s, n, t in points) / steps
    token_s = min(max(0.0, common / spread), seconds / steps / mean)
    return max(0.0, seconds / steps - token_s * mean), token_s


class Advisor:
    """Gathers the inputs of `advise`; `gauges` returns the newest advice and the last error.

    note_report(work)            # for each server report
    note_step(row, groups, ...)  # for each step
    await advise_forever()       # makes the predictions
    """

    def __init__(self, write: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Takes `write`, which replaces the advice file, and `warn`, which adds a warning event."""
        self._write, self._warn, self._has_warned = write, warn, False
        self._steps: deque[StepCosts] = deque(maxlen=WINDOW_STEPS)
        self._groups: deque[Group] = deque()
        self._work: deque[ServerWork] = deque(maxlen=MOST_REPORTS)
        self._due = asyncio.Event()
        self._places = self._groups_per_step = 0
        self._waste, self._in_turns = 1.0, False
        self.advice: Advice | None = None
        # Predicted over measured, less 1, of the last prediction that could be checked.
        self.error = math.nan
        # Steps of one setting in a row, since the last prediction, and their seconds.
        self._since, self._since_s = 0, 0.0
        self._may_at_s = 0.0
        self._is_first = True

    def note_report(self, work: ServerWork) -> None:
        """Notes the work of a server between two reports."""
        self._work.append(work)

    def note_step(
        self,
        row: Mapping[str, float],
        groups: Sequence[LeasedGroup],
        *,
        setting: Setting,
        places: int,
        waste: float,
        in_turns: bool,
    ) -> None:
        """Notes the costs of a step that was trained under `setting`.

        `places` is the number of episodes that a server runs at a time, and `waste` the number of
        generated tokens per trained token. `in_turns` says whether engines rest while the learner
        trains.
        """
        if self._steps and self._steps[-1].setting != setting:
            self._since, self._since_s = -1, 0.0
        computing_s = sum(_number(row, name) for name in ("forward_s", "forward_backward_s"))
        costs = StepCosts(
            setting=setting,
            step_s=row["step_s"],
            waited_s=_number(row, "groups_wait_s"),
            training_s=row["training_s"],
            computing_s=min(computing_s, row["training_s"]),
            publish_s=_number(row, "publish_s"),
            pause_s=_number(row, "pause_s"),
            tokens=row["num_tokens"],
        )
        if self._is_first:
            # The first step includes the time of loading.
            self._is_first = False
        else:
            self._since += 1
            self._since_s += costs.step_s if self._since else 0.0
            self._steps.append(costs)
        self._places, self._groups_per_step, self._waste = places, len(groups), waste
        self._in_turns = in_turns
        for group in groups:
            members = group.in_order()
            self._groups.append(
                tuple(
                    Episode(each.num_sampled_tokens, len(each.token_ids), outside_s(group, each))
                    for each in members
                )
            )
        kept = max(LEAST_GROUPS, MOST_EPISODES // max(1, setting.group_size))
        while len(self._groups) > kept:
            self._groups.popleft()
        if self._since >= EVERY_STEPS and time.monotonic() >= self._may_at_s:
            self._due.set()

    async def advise_forever(self) -> None:
        """Computes new advice after each `EVERY_STEPS` steps under one setting, until cancelled.

        Stores the advice in `advice`, and replaces the advice file. Waits longer if the last
        computation took much processor time.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            over = threading.Event()
            try:
                self._check()
                profile = self.profile()
                if profile is None:
                    continue
                self.advice, took_s = await asyncio.to_thread(_timed_advice, profile, over.is_set)
            except FAULTS as error:
                # A report with impossible numbers must not end the run.
                if not self._has_warned:
                    self._warn(f"there is no advice: {type(error).__name__}: {error}")
                self._has_warned = True
                continue
            finally:
                # The process waits for the thread, which can take seconds under a large bound.
                over.set()
            self._may_at_s = time.monotonic() + PAUSE * took_s
            # Steps that came meanwhile wait as well.
            self._due.clear()
            table = {"profile": profile_to_json(profile), **self.summary()}
            self._write(json.dumps(table) + "\n")

    def _check(self) -> None:
        """Compares the last prediction for this setting with the steps that followed it."""
        if self._since < 1:
            # The setting has changed since it was due.
            return
        setting = self._steps[-1].setting
        if self.advice is not None and setting in (told := self.advice.predictions()):
            self.error = told[setting] * self._since_s / self._since - 1
        self._since, self._since_s = 0, 0.0

    def profile(self) -> Profile | None:
        """Returns the measured profile, or None if the data does not suffice for a prediction."""
        engine = engine_costs(self._work)
        setting = self._steps[-1].setting if self._steps else None
        if engine is None or setting is None or setting.servers < 1:
            return None
        if self._places < setting.group_size:
            return None
        steps = list(self._steps)
        tokens = sum(step.tokens for step in steps)
        busy_s = [s.step_s - s.waited_s - s.training_s - s.publish_s for s in steps]
        order_s = max(0.0, statistics.fmean(busy_s))
        return Profile(
            setting=setting,
            groups_per_step=self._groups_per_step,
            places=self._places,
            engine_step_s=max(engine[0] * self._waste, LEAST_STEP_S),
            engine_token_s=engine[1] * self._waste,
            training_fixed_s=statistics.fmean(s.training_s - s.computing_s for s in steps),
            training_token_s=sum(s.computing_s for s in steps) / tokens if tokens else 0.0,
            publish_s=statistics.fmean(s.publish_s for s in steps),
            order_s=order_s,
            pause_s=statistics.fmean(s.pause_s for s in steps),
            groups=tuple(self._groups),
            resting_order_s=min(order_s, self._rest_s(steps)) if self._in_turns else None,
        )

    def _rest_s(self, steps: Sequence[StepCosts]) -> float:
        """Returns the mean seconds of rest per step, less the time of training and publishing."""
        uptime_s = sum(work.uptime_s for work in self._work)
        share = sum(work.paused_s for work in self._work) / uptime_s if uptime_s > 0 else 0.0
        rests_s = [share * s.step_s - s.training_s - s.publish_s for s in steps]
        return max(0.0, statistics.fmean(rests_s))

    def gauges(self) -> dict[str, float]:
        """Returns the newest advice as metrics, or {} before the first advice."""
        advice = self.advice
        if advice is None:
            return {}
        return {
            "predicted_steps_per_s": advice.now.steps_per_s,
            **({} if math.isnan(self.error) else {"prediction_error": self.error}),
            **{f"gain/{each.name}": each.gain for each in advice.alternatives},
            "wanted_servers": float(advice.wanted_servers),
        }

    def summary(self) -> dict[str, JsonValue]:
        """Returns the newest advice for the run's summary, or {} before the first advice."""
        if self.advice is None:
            return {}
        return {
            "predicted_steps_per_s": self.advice.now.steps_per_s,
            "prediction_error": None if math.isnan(self.error) else self.error,
            "wanted_servers": self.advice.wanted_servers,
            "gains": {CHANGES[each.name]: each.gain for each in self.advice.alternatives},
        }


def _timed_advice(profile: Profile, is_over: Callable[[], bool]) -> tuple[Advice, float]:
    """Returns the advice, and the CPU seconds that it took."""
    started_s = time.thread_time()
    return advise(profile, is_over), time.thread_time() - started_s


def _number(row: Mapping[str, float], name: str) -> float:
    value = row.get(name, 0.0)
    return value if math.isfinite(value) else 0.0
