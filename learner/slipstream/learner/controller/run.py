"""What all parts of the controller share of their run."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.settings.config import Config
from slipstream.learner.controller.events import EventLog, Signal
from slipstream.learner.controller.lease_freshness import Freshness
from slipstream.learner.controller.lease_pace import JustInTime
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.progress import RunProgress


@dataclass(frozen=True)
class Run:
    """The settings, events, clock and progress of one run."""

    config: Config
    events: EventLog
    # Notified at each change for which a task may wait.
    signal: Signal
    # Measures the silence and delays of servers and trainer.
    clock: LoopClock
    progress: RunProgress
    # The pace of leases; None: groups are leased as early as the staleness bound allows.
    pace: JustInTime | None
    # Whether leases wait for a version that is being made; None: they never do.
    freshness: Freshness | None

    @classmethod
    def of(cls, config: Config, run_id: str) -> Run:
        """The run of `config` before its first step; a journal may give it another id."""
        events, signal, clock = EventLog(), Signal(), LoopClock()
        algorithm, pace, freshness = config.algorithm, None, None
        if algorithm.lease_policy == "just_in_time":
            pace = JustInTime(
                groups_per_step=algorithm.groups_per_step, max_staleness=algorithm.max_staleness
            )
        else:
            freshness = Freshness()
        progress = RunProgress(
            run_id, num_steps=config.run.steps, events=events, signal=signal, clock=clock
        )
        return cls(config, events, signal, clock, progress, pace, freshness)

    @property
    def lease_rules(self) -> list[JustInTime | Freshness]:
        """The rules of the leases that measure the trainer's waits and steps."""
        return [rule for rule in (self.pace, self.freshness) if rule is not None]
