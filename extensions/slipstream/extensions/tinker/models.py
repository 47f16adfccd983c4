"""Operations, and the models that they train: streams, adapters, and what each has published.

No I/O. With `lora.adapters` each of these is the place of one model; without, there is one model,
which the newest stream takes over.
"""

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from slipstream.core.settings.role_sections import LoraSection
from slipstream.core.types import GroupId, Trajectory
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.session import Outbox
from slipstream.learner.controller.trajectories.batch import StepOrder
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2

# A model of a client that is silent for so long gives up its place if another one needs it.
IDLE_S = 600.0
# Publishes of a model whose steps are known; servers have the newest one or two.
KEPT_PUBLISHES = 64


@dataclass(eq=False)
class Entry:
    """One operation and its result."""

    operation: pb.Operation
    # Its number on the disk; None for a sample.
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
            # Its reader does not read; whoever asks by id gets the result.
            self.outbox.close()
        self.outbox = None


@dataclass(eq=False)
class Model:
    """The model of a stream."""

    stream: str
    # Its adapter; without a name it is the run's only model.
    adapter: trainer_pb2.Adapter
    # The number of its next operation.
    next: int = 0
    # The operation with which it began, and the one that is done last.
    first: Entry | None = None
    last: Entry | None = None
    # The passes since its newest step whose gradients the trainer holds.
    passes: list[Entry] = field(default_factory=list)
    # Its steps and loads so far, and by version how many there were at its newest publishes.
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
        newest = max((one for one in self.published if one <= version), default=None)
        before = 0 if newest is None else self.published[newest]
        return self.steps - before > self.max_staleness

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
            tuple(one.operation.compute for one in passes),
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

    def newest(self, name: str) -> Model | None:
        """Returns the model whose newest state, saved or not, is meant by the path `name`."""
        only = () if self.are_several else ("tinker://newest",)
        for stream, model in self.by_stream.items():
            if name in (f"tinker://{stream}/newest", *only):
                return model
        return None

    def take(self, stream: str, adapter: trainer_pb2.Adapter) -> Model:
        """Returns the model of a new stream, in the place that `adapter` names, or a free one."""
        own = trainer_pb2.Adapter()
        own.CopyFrom(adapter)
        own.name = own.name or self._free()
        for taken in [one for one in self.by_stream.values() if one.adapter.name == own.name]:
            del self.by_stream[taken.stream]
        model = self.by_stream[stream] = Model(stream, own)
        return model

    def refusal(self) -> str:
        """Returns why there is no place for one more model, or "" if there is one."""
        if not self.are_several or self._free():
            return ""
        return (
            f"all {len(self._places)} places for models (lora.adapters) are taken: one is free "
            "when the session of its model has finished, or was silent for ten minutes"
        )

    def _free(self) -> str:
        """Returns a place without a model, or that of a model which is not used, or ""."""
        taken = {model.adapter.name: model for model in self.by_stream.values()}
        for place in self._places:
            if place not in taken:
                return place
        idle_s = time.monotonic() - IDLE_S
        unused = [
            model
            for model in taken.values()
            if model.session in self.finished or model.used_s < idle_s
        ]
        return min(unused, key=lambda model: model.used_s).adapter.name if unused else ""

    def lasting(self, steps: Collection[int]) -> set[Entry | None]:
        """Returns the operations that a restart needs, and drops names of what is not there.

        `steps` are those with a checkpoint.
        """
        for name, one in list(self.named.items()):
            model, is_saved = one.model, not one.step or one.step in steps
            is_served = (
                model and self.is_there(model) and (one.in_flight or one.step == model.served)
            )
            if not is_saved and not is_served:
                del self.named[name]
        there = self.by_stream.values()
        own = {model.session for model in there}
        self.finished = {name: one for name, one in self.finished.items() if name in own}
        owners = {one.model for one in self.named.values() if one.model} | {*there}
        of_models = [[model.first, model.last, *model.passes] for model in owners]
        named = [one.entry for one in self.named.values()]
        return {*named, *self.finished.values(), *(entry for each in of_models for entry in each)}

    def kept(self) -> dict[int, float]:
        """Returns until when, in seconds since 1970, each version stays that a client has saved."""
        found: dict[int, float] = {}
        for one in self.named.values():
            if one.entry is not None and one.entry.kind == "save":
                until_s = one.entry.operation.kept.until_unix_s or math.inf
                found[one.step] = max(until_s, found.get(one.step, 0.0))
        return found
