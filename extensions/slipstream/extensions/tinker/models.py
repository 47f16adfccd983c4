"""Operations, and the models that they train: streams, adapters, and what each has published.

No I/O. With `lora.adapters` each of these is the place of one model; without, the run's only model
is the only place, which the newest stream of its owner takes over.
"""

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from slipstream.core.settings.role_sections import LoraSection
from slipstream.core.types import GroupId, Trajectory
from slipstream.extensions.tinker.owners import have_one_owner
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.session import Outbox
from slipstream.learner.controller.trajectories.formed_batch import StepOrder
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2

# A session that is silent for so long has ended if its place is needed: the SDK beats every ten
# seconds.
IDLE_S = 60.0
# Publishes of a model whose steps are known; servers have the newest one or two.
KEPT_PUBLISHES = 64


@dataclass(eq=False)
class Entry:
    """One operation and its result."""

    operation: pb.Operation
    # The number on the disk; None for a sample.
    place: int | None = None
    # Empty again when the disk has it: a long loop has more results than memory.
    result: pb.OperationResult = field(default_factory=pb.OperationResult)
    # Set when the result may be told.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    # The stream that is to tell the result of a sample.
    outbox: Outbox[pb.OperationResult] | None = None
    # The version after it, and whether a client has been told of its end.
    step: int = 0
    is_told: bool = False
    # Whether the trainer has it, and whether nothing is left for it: of a publish, or of a load of
    # what it has.
    is_begun: bool = False
    is_made: bool = False
    # The replies to a sample that servers have, and those that have come.
    groups: dict[GroupId, Group] = field(default_factory=dict)
    finished: list[Trajectory] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The name of the operation's field."""
        return self.operation.WhichOneof("operation") or ""

    @property
    def num_missing(self) -> int:
        """The number of replies to a sample that no server has yet."""
        return self.operation.sample.num_samples - len(self.groups) - len(self.finished)

    def tell(self) -> None:
        """Gives the result of a sample to the stream that asked for it."""
        if self.outbox is not None and not self.outbox.put(self.result):
            # A reader that does not read gets the result by its id.
            self.outbox.close()
        self.outbox = None


@dataclass(eq=False)
class Model:
    """The model of a stream."""

    stream: str
    # The adapter; without a name it is the run's only model.
    adapter: trainer_pb2.Adapter
    # The number of its next operation.
    next: int = 0
    # The operation with which it began, and the one that is done last.
    first: Entry | None = None
    last: Entry | None = None
    # The passes since its newest step whose gradients the trainer holds.
    passes: list[Entry] = field(default_factory=list)
    # Steps and loads so far, and by version how many there were at the newest publishes.
    steps: int = 0
    published: dict[int, int] = field(default_factory=dict)
    # Most of these behind which a reply may be, if its client has said so.
    max_staleness: int | None = None
    used_s: float = field(default_factory=time.monotonic)

    @property
    def session(self) -> str:
        return self.stream.partition(":")[0]

    @property
    def served(self) -> int:
        """The version of its newest publish; older ones are not served."""
        return max(self.published, default=0)

    def publish(self, version: int) -> None:
        """Notes that servers get its newest values as `version`."""
        self.published[version] = self.steps
        for old in sorted(self.published)[:-KEPT_PUBLISHES]:
            del self.published[old]

    def is_stale(self, version: int) -> bool:
        """Whether what servers of a version sample is too far behind the steps of this model."""
        if self.max_staleness is None:
            return False
        publishes = [publish for publish in self.published if publish <= version]
        steps_then = self.published[max(publishes)] if publishes else 0
        return self.steps - steps_then > self.max_staleness

    def touch(self) -> None:
        """Notes that its client uses it."""
        self.used_s = time.monotonic()

    def order(self, step: Entry, passes: Sequence[Entry]) -> StepOrder:
        """Returns what a step of Adam asks of the trainer."""
        return StepOrder(
            trainer_pb2.GivenStep(
                id=step.operation.id,
                adapter=self.adapter,
                num_passes=len(passes),
                adam=step.operation.step,
            ),
            tuple(entry.operation.compute for entry in passes),
        )


@dataclass(frozen=True)
class Named:
    """The version of a publish or a saved state, and its model, None for the initial one."""

    step: int
    model: Model | None = None
    # The operation that gave the name.
    entry: Entry | None = None
    # Whether samples of the name are by whatever is served.
    in_flight: bool = False


class Models:
    """The models by stream."""

    def __init__(self, lora: LoraSection) -> None:
        self._places = lora.adapters or ("",)
        self.are_several = bool(lora.adapters)
        # First those whose turn was longest ago.
        self.by_stream: dict[str, Model] = {}
        # The operations that ended sessions.
        self.finished: dict[str, Entry] = {}
        # Publishes and saved states by their names.
        self.named: dict[str, Named] = {"": Named(0)}

    def is_there(self, model: Model) -> bool:
        """Whether a model has its place."""
        return self.by_stream.get(model.stream) is model

    def turn(self, model: Model) -> None:
        """Notes that it is the turn of `model`."""
        model.touch()
        self.by_stream[model.stream] = self.by_stream.pop(model.stream)

    def newest(self, name: str, stream: str) -> Model | None:
        """Returns the model whose newest state, saved or not, `stream` means by the path `name`."""
        for own_stream, model in self.by_stream.items():
            if not have_one_owner(own_stream, stream):
                continue
            is_only = name == "tinker://newest" and not self.are_several
            if is_only or name == f"tinker://{own_stream}/newest":
                return model
        return None

    def take(self, stream: str, adapter: trainer_pb2.Adapter) -> Model:
        """Returns the model of a new stream, in the place that `adapter` names, or a free one."""
        placed = trainer_pb2.Adapter()
        placed.CopyFrom(adapter)
        placed.name = placed.name or self._free(stream) or ""
        previous = [model for model in self.by_stream.values() if model.adapter.name == placed.name]
        for model in previous:
            del self.by_stream[model.stream]
        self.by_stream[stream] = Model(stream, placed)
        return self.by_stream[stream]

    def refusal(self, stream: str) -> str:
        """Returns why there is no place for the model of a new stream, or "" if there is one."""
        if self._free(stream) is not None:
            return ""
        if not self.are_several:
            return (
                "the run's only model is that of another api_key: it is free when the session of "
                f"its model has finished, or was silent for {IDLE_S:.0f} s (lora.adapters makes "
                "places for several)"
            )
        return (
            f"all {len(self._places)} places for models (lora.adapters) are taken: one is free "
            f"when the session of its model has finished, or was silent for {IDLE_S:.0f} s"
        )

    def _free(self, stream: str) -> str | None:
        """Returns a place for `stream`: one without a model, or whose model is not used, or None.

        The run's only model goes over to any stream of its owner.
        """
        model_at = {model.adapter.name: model for model in self.by_stream.values()}
        for place in self._places:
            if place not in model_at:
                return place
        idle_s = time.monotonic() - IDLE_S
        free = [
            model
            for model in model_at.values()
            if model.session in self.finished
            or model.used_s < idle_s
            or (not self.are_several and have_one_owner(model.stream, stream))
        ]
        return min(free, key=lambda model: model.used_s).adapter.name if free else None

    def lasting(self, steps: Collection[int]) -> set[Entry | None]:
        """Returns the operations that a restart needs, and drops names of what is not there.

        `steps` are those with a checkpoint.
        """
        for name, target in list(self.named.items()):
            model = target.model
            is_saved = not target.step or target.step in steps
            is_newest = model is not None and (target.in_flight or target.step == model.served)
            is_served = model is not None and self.is_there(model) and is_newest
            if not is_saved and not is_served:
                del self.named[name]
        sessions = {model.session for model in self.by_stream.values()}
        self.finished = {
            session: entry for session, entry in self.finished.items() if session in sessions
        }
        owners = {target.model for target in self.named.values() if target.model}
        owners |= set(self.by_stream.values())
        lasting = {target.entry for target in self.named.values()} | {*self.finished.values()}
        for model in owners:
            lasting |= {model.first, model.last, *model.passes}
        return lasting

    def kept(self) -> dict[int, float]:
        """Returns until when, in seconds since 1970, each version stays that a client has saved."""
        ends_s: dict[int, float] = {}
        for target in self.named.values():
            if target.entry is not None and target.entry.kind == "save":
                until_s = target.entry.operation.kept.until_unix_s or math.inf
                ends_s[target.step] = max(until_s, ends_s.get(target.step, 0.0))
        return ends_s
