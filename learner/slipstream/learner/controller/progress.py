"""The progress of the run: the only mutable state that all parts of the controller share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slipstream.learner.controller.events import EventLog, Severity, Signal
from slipstream.learner.controller.lease_pace import JustInTime
from slipstream.learner.controller.loop_clock import LoopClock
from slipstream.learner.controller.stopwatch import Stopwatch
from slipstream.protocol.settings.config import Config
from slipstream.protocol.types import PolicyVersion
from slipstream.protocol.weights.transports import Place
from slipstream.v1 import status_pb2


@dataclass(frozen=True)
class OverduePublish:
    """The publish under way, which the trainer must end before its deadline."""

    publish_id: str
    # Deadline, by the run's clock.
    until_s: float
    # Seconds from the publish's last order to the deadline.
    limit_s: float


@dataclass(eq=False)
class RunProgress:
    """State of the run; `signal` is notified at each change for which a task may wait."""

    run_id: str
    config: Config
    events: EventLog
    signal: Signal = field(default_factory=Signal)
    # The clock that measures the silence and delays of servers and trainer.
    clock: LoopClock = field(default_factory=LoopClock)
    state: status_pb2.RunState = status_pb2.RUN_STATE_STARTING
    cause: str = ""
    # The newest version that the trainer has made.
    version: PolicyVersion = PolicyVersion(0, 0)
    # The newest timeline; timelines are counted from 0.
    newest_incarnation: int = 0
    trainer_registered: bool = False
    # Time of the trainer's last call, by `clock`.
    trainer_heard_s: float = field(init=False)
    # The newest version with a reported checkpoint; 0: none so far.
    checkpoint_step: int = 0
    # Whether the run was told to end before its last step.
    is_stopped: bool = False
    # The place of each trainer rank; empty before a trainer has registered.
    learner_places: tuple[Place, ...] = ()
    # Why training ends before its last configured step; empty: it does not.
    solved: str = ""
    waiting_for: str = "the trainer"
    # Secret of the controller, from which the keys of rollout servers are made.
    run_key: bytes = b""
    started_s: float = field(default_factory=time.monotonic)
    # Time in which a server served since the last progress: an ended episode or a made step.
    idle: Stopwatch = field(default_factory=Stopwatch)
    # The publish whose end the trainer has yet to report; None: there is none.
    pending_publish: OverduePublish | None = None
    # The version with which training ends.
    last_step: int = field(init=False)
    # The batch at which the trainer failed and the way past it; empty: none.
    suspect: str = ""
    # The pace of leases; None: groups are leased as early as the staleness bound allows.
    pace: JustInTime | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.trainer_heard()
        self.last_step = self.config.run.steps
        algorithm = self.config.algorithm
        if algorithm.lease_policy == "just_in_time":
            self.pace = JustInTime(
                groups_per_step=algorithm.groups_per_step, max_staleness=algorithm.max_staleness
            )

    @property
    def is_over(self) -> bool:
        """Whether no more training will happen."""
        return self.state in (
            status_pb2.RUN_STATE_STOPPING,
            status_pb2.RUN_STATE_FINISHED,
            status_pb2.RUN_STATE_FAILED,
            status_pb2.RUN_STATE_STOPPED,
        )

    @property
    def all_steps_done(self) -> bool:
        """Whether the last version exists."""
        return self.version.step >= self.last_step

    def reached(self, version: PolicyVersion) -> None:
        """Notes that the trainer has made a version, or continues from it."""
        self.suspect = ""
        self.version = version
        self.newest_incarnation = max(self.newest_incarnation, version.incarnation)

    @property
    def final_state(self) -> status_pb2.RunState:
        """The state of the run once everything has ended."""
        if self.state == status_pb2.RUN_STATE_FAILED:
            return self.state
        if self.is_stopped:
            return status_pb2.RUN_STATE_STOPPED
        return status_pb2.RUN_STATE_FINISHED

    def trainer_heard(self) -> None:
        """Notes a call of the trainer."""
        self.trainer_heard_s = self.clock.now_s()

    def trainer_works(self) -> None:
        """Notes progress of the trainer in a long operation."""
        self.trainer_heard()
        self.idle.reset(self.clock.now_s())

    def moved(self) -> None:
        """Notes progress."""
        self.idle.reset(self.clock.now_s())
        self.signal.notify()

    def solve(self, last_step: int, cause: str) -> None:
        """Makes version `last_step` the last one; the run then ends as after its last step."""
        self.last_step, self.solved = last_step, cause
        self.events.add(cause)
        self.signal.notify()

    def stop(self, reason: str) -> None:
        """Ends the run early, in order."""
        if not self.is_over:
            self.state, self.cause = status_pb2.RUN_STATE_STOPPING, reason
            self.is_stopped = True
            self.events.add(f"stopping: {reason}")
            self.signal.notify()

    def fail(self, cause: str) -> None:
        """Ends the run as failed; the first cause stays."""
        if self.state != status_pb2.RUN_STATE_FAILED:
            cause = f"{cause}; {self.suspect}" if self.suspect else cause
            self.state, self.cause = status_pb2.RUN_STATE_FAILED, cause
            self.events.add(f"the run failed: {cause}", Severity.ERROR)
            self.signal.notify()
