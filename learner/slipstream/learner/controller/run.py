"""What all parts of the controller share of their run."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.settings.config import Config
from slipstream.learner.controller.events import EventLog, Signal
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

    @classmethod
    def of(cls, config: Config, run_id: str) -> Run:
        """The run of `config` before its first step; a journal may give it another id."""
        events, signal, clock = EventLog(), Signal(), LoopClock()
        progress = RunProgress(
            run_id, num_steps=config.run.steps, events=events, signal=signal, clock=clock
        )
        return cls(config, events, signal, clock, progress)
