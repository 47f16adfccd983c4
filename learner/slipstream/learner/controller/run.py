"""The settings, events, clock and progress that all parts of the controller share.

The clock leaves out stalls of the event loop.
"""

import asyncio
import logging
import math
import time
from collections.abc import Collection, Iterable
from typing import Any

from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.controller.events import EventLog, Signal
from slipstream.v1 import status_pb2
from slipstream.v1.weights_pb2 import Place

# Seconds within which a trainer that lives is heard of again after a restart of the controller.
HEARD_S = 30.0


class ControlledRun:
    """The settings, events, clock and progress of one run."""

    def __init__(self, config: Config, run_id: str) -> None:
        """Begins a new run of `config`; `run_id` is replaced if a journal is resumed."""
        self.config = config
        self.events = EventLog()
        # Notified at each change for which a task may wait.
        self.signal = Signal()
        # Measures the silence and delays of servers and trainer.
        self.clock = LoopClock()
        self.progress = RunProgress(self, run_id)


class RunProgress:
    """State and version of the run. Other parts read the attributes; only the methods change them.

    STARTING --trainer_registered--> RUNNING --complete--> STOPPING --end--> FINISHED
    STARTING or RUNNING --stop--> STOPPING --end--> STOPPED
    all of them --fail--> FAILED
    """

    def __init__(self, run: ControlledRun, run_id: str) -> None:
        self._events = run.events
        self._signal = run.signal
        self._clock = run.clock
        self.run_id = run_id
        # Secret of the controller, from which the keys of rollout servers are made.
        self.run_key = b""
        self.started_s = time.monotonic()
        self.state: status_pb2.RunState = status_pb2.RUN_STATE_STARTING
        # Why the run ends. Empty while it goes on.
        self.cause = ""
        self._is_stopped = False
        # The newest version that the trainer has made.
        self.version = PolicyVersion(0, 0)
        # The newest incarnation, counted from 0.
        self.newest_incarnation = 0
        # The last version of the training.
        self.last_step = run.config.run.steps
        self.has_trainer = False
        # The place of each trainer rank; empty before a trainer has registered.
        self.learner_places: tuple[Place, ...] = ()
        # Time of the trainer's last call, by the run's clock.
        self.trainer_heard_s = run.clock.now_s()
        self.waiting_for = "the trainer"
        # Time in which a server served since the last progress: an ended episode or a made step.
        self._idle = Stopwatch()
        # The batch at which the trainer failed and how to skip it, as text. Empty without one.
        self._suspect = ""
        # The failure of a trainer without a place, and its time by the run's clock.
        self._unplaced_failure: tuple[str, float] | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in (status_pb2.RUN_STATE_STARTING, status_pb2.RUN_STATE_RUNNING)

    @property
    def has_failed(self) -> bool:
        return self.state == status_pb2.RUN_STATE_FAILED

    @property
    def may_go_on(self) -> bool:
        """Whether the run was stopped or has failed, so that a later command may go on with it."""
        return self._is_stopped or self.has_failed

    @property
    def all_steps_done(self) -> bool:
        return self.version.step >= self.last_step

    @property
    def idle_s(self) -> float:
        """Seconds since the run's last progress, counted only while a server serves."""
        return self._idle.total_s(self._clock.now_s())

    def begin(self, run_id: str, run_key: bytes, version: PolicyVersion) -> None:
        """Takes over the run's id, key and version from the journal."""
        self.run_id = run_id
        self.run_key = run_key
        self.reached(version)

    def trainer_registered(self, places: Iterable[Place]) -> None:
        """Notes a new trainer and its ranks' places; unless it is over, the run is RUNNING."""
        self.has_trainer = True
        self.learner_places = tuple(places)
        self._unplaced_failure = None
        if not self.is_over:
            self.state = status_pb2.RUN_STATE_RUNNING

    def trainer_heard(self) -> None:
        """Notes a call of the trainer."""
        self.trainer_heard_s = self._clock.now_s()

    def trainer_works(self) -> None:
        """Notes progress of the trainer in a long operation."""
        self.trainer_heard()
        self._idle.reset(self._clock.now_s())

    def trainer_failed(self, suspect: str) -> None:
        """Stores `suspect`, a text that names the batch at which the trainer failed.

        The text also says how to skip the batch. It is added to the cause if the run fails, and is
        "" if no batch is to blame.
        """
        self._suspect = suspect

    def fail_unless_heard(self, cause: str) -> None:
        """Notes the failure of a trainer that has no place, while no trainer is registered.

        It becomes that of the run, by `unheard_failure`, unless another trainer lives.
        """
        self._unplaced_failure = (cause, self._clock.now_s())

    @property
    def unheard_failure(self) -> str:
        """The cause of `fail_unless_heard` once `HEARD_S` passed without a trainer, else ""."""
        if self._unplaced_failure is None:
            return ""
        cause, failed_s = self._unplaced_failure
        silent_s = self._clock.now_s() - max(failed_s, self.trainer_heard_s)
        return cause if silent_s > HEARD_S else ""

    def note_serving(self, is_any: bool) -> None:
        """Notes whether any server serves; `idle_s` grows only while a server serves."""
        self._idle.note(self._clock.now_s(), running=is_any)

    def waits_for(self, what: str) -> None:
        """Notes what the run waits for, as text for people."""
        self.waiting_for = what

    def reached(self, version: PolicyVersion) -> None:
        """Notes that the trainer has made `version`, or resumes from it."""
        self._suspect = ""
        self.version = version
        self.newest_incarnation = max(self.newest_incarnation, version.incarnation)

    def moved(self, *, gathered: bool = False) -> None:
        """Notes progress of the run: resets the idle time, and notifies (`Signal.notify`)."""
        self._idle.reset(self._clock.now_s())
        self._signal.notify(gathered=gathered)

    def complete(self) -> None:
        """Ends the training after its last step."""
        self.state = status_pb2.RUN_STATE_STOPPING
        self.cause = "all steps are done"
        self._signal.notify()

    def stop(self, reason: str) -> None:
        """Stops the run early and cleanly; does nothing if the run is over."""
        if not self.is_over:
            self.state = status_pb2.RUN_STATE_STOPPING
            self.cause = reason
            self._is_stopped = True
            self._events.add(f"stopping: {reason}")
            self._signal.notify()

    def fail(self, cause: str) -> None:
        """Ends the run as failed; a second call does not change the cause."""
        if not self.has_failed:
            self.cause = f"{cause}; {self._suspect}" if self._suspect else cause
            self.state = status_pb2.RUN_STATE_FAILED
            self._events.add(f"the run failed: {self.cause}", logging.ERROR)
            self._signal.notify()

    def end(self) -> None:
        """Notes that all processes have left, so that the state is final."""
        self.waiting_for = ""
        if not self.has_failed:
            stopped = status_pb2.RUN_STATE_STOPPED
            finished = status_pb2.RUN_STATE_FINISHED
            self.state = stopped if self._is_stopped else finished


class Stopwatch:
    """A stopwatch that adds up the seconds in which it runs."""

    def __init__(self) -> None:
        self._running_since_s: float | None = None
        self._total_s = 0.0

    def note(self, now_s: float, *, running: bool) -> None:
        """Starts or stops the stopwatch at `now_s`."""
        self._total_s = self.total_s(now_s)
        self._running_since_s = now_s if running else None

    def reset(self, now_s: float) -> None:
        """Sets the total to 0; the stopwatch keeps running if it ran."""
        self._total_s = 0.0
        if self._running_since_s is not None:
            self._running_since_s = now_s

    def total_s(self, now_s: float) -> float:
        """Returns the seconds in which the stopwatch has run until `now_s`."""
        since_s = self._running_since_s
        return self._total_s + (0.0 if since_s is None else now_s - since_s)


class LoopClock:
    """A clock that runs like `time.monotonic`, but not while the event loop is stalled.

    A task of the loop calls `look` periodically and passes the time of its next call. While that
    call is overdue the clock stays at the time when it was due. Without calls of `look` the clock
    is `time.monotonic`.

        clock.look(10.0, next_s=10.5)
        clock.at(10.2)  # 10.2
        clock.at(19.0)  # 10.5: the loop has not run since
        clock.look(19.0, next_s=19.5)
        clock.at(19.1)  # 10.6
    """

    def __init__(self) -> None:
        self._due_s = math.inf
        self._missed_s = 0.0

    def at(self, now_s: float) -> float:
        """Returns the time of this clock when `time.monotonic` is `now_s`."""
        return min(now_s, self._due_s) - self._missed_s

    def look(self, now_s: float, next_s: float) -> None:
        """Notes that the loop runs at `now_s`; the next call is due by `next_s`."""
        self._missed_s += max(0.0, now_s - self._due_s)
        self._due_s = next_s

    def now_s(self) -> float:
        """Returns the present time of this clock."""
        return self.at(time.monotonic())

    async def wait(self, futures: Collection[asyncio.Future[Any]], limit_s: float) -> None:
        """Waits until all futures are done or `limit_s` seconds of this clock have passed."""
        until_s = self.now_s() + limit_s
        pending = {future for future in futures if not future.done()}
        while pending and (left_s := until_s - self.now_s()) > 0:
            _, pending = await asyncio.wait(pending, timeout=left_s)
