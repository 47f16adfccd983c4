"""A copy plan for a model some of whose matrices vLLM keeps in FP8.

The copies of such a matrix go to a landing, plain memory beside the engine's. With the last copy
the matrix is quantised from there into the live one, in place, as vLLM's loader would do it.
Matrices that do not arrive at the same time share a landing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from slipstream.rollout_server.vllm.weights.fp8_linears import Fp8Linear
from slipstream.rollout_server.weights.copy_plan import (
    Copy,
    CopyPlan,
    NotCopied,
    Parameters,
    PlanCheck,
    Replay,
    View,
    equal_bits,
)


@dataclass(frozen=True)
class Fp8Plan(CopyPlan):
    """A copy plan and the live matrices that are quantised after its copies, by name."""

    linears: Mapping[str, Fp8Linear]
    # Whether these are kept as they arrived too, each in a landing of its own.
    keeps_plain: bool = False

    @classmethod
    def of(
        cls, plan: CopyPlan, linears: Mapping[str, Fp8Linear], *, keeps_plain: bool = False
    ) -> Fp8Plan:
        """Raises NotCopied unless every copy of a quantised matrix fills whole rows."""
        found = cls(plan.buckets, plan.copies, linears, keeps_plain)
        found.parts()
        return found

    def parts(self) -> dict[str, list[_Part]]:
        """Returns the parts of each quantised matrix in the order in which they arrive."""
        found: dict[str, list[_Part]] = {name: [] for name in self.linears}
        for copy in (copy for part in self.copies for copy in part):
            if copy.parameter in self.linears:
                part = _Part.of(copy, self, self.linears[copy.parameter])
                found[copy.parameter].append(part)
        return found


@dataclass(frozen=True)
class _Part:
    """One copy into a landing, and the rows of its bucket whose greatest values set the scales."""

    copy: Copy
    rows: slice
    # Whole rows, of which a worker may have only a part: so all workers find the same.
    measured: View

    @classmethod
    def of(cls, copy: Copy, plan: CopyPlan, linear: Fp8Linear) -> _Part:
        """Raises NotCopied unless the copy fills whole rows from rows of one tensor."""
        target, source, size = copy.destination, copy.source, copy.dtype.itemsize
        first = source.offset * size
        span = next(
            span
            for span in plan.buckets[copy.bucket].spans
            if span.offset_bytes <= first < span.offset_bytes + span.tensor.num_bytes
        )
        _, columns = linear.shape
        matrix = span.tensor.shape
        is_rows = len(matrix) == len(target.shape) == 2 and target.shape[1] == columns
        if not is_rows or target.strides != (columns, 1) or source.strides != (matrix[1], 1):
            raise NotCopied(f"{copy.parameter} is not loaded row by row")
        begin, width = span.offset_bytes // size, matrix[1]
        start, count = target.offset // columns, target.shape[0]
        row = (source.offset - begin) // width
        measured = View(begin + row * width, (count, width), (width, 1))
        return cls(copy, slice(start, start + count), measured)

    def measure(self, buffer: torch.Tensor, landing: _Landing) -> None:
        """Writes the greatest absolute values of this part, which has landed, to its rows."""
        found = landing.plain[self.rows]
        if self.measured != self.copy.source:
            # Other workers have the rest. The bucket may lie in main memory, slow to look through.
            typed = buffer.view(self.copy.dtype)
            found = self.measured.within(typed, int(typed.storage_offset())).to(found.device)
        low, high = found.aminmax(dim=1, keepdim=True)
        landing.largest[self.rows].copy_(torch.maximum(low.abs(), high.abs()))


@dataclass(frozen=True)
class _Landing:
    """The plain memory of one matrix, and the greatest values of its rows."""

    plain: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, linear: Fp8Linear, memory: torch.Tensor | None = None) -> _Landing:
        """Takes the start of `memory`, or memory of its own."""
        device, num_bytes = linear.weight.device, linear.plain_bytes
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        plain = memory[:num_bytes].view(linear.dtype).view(linear.shape)
        largest = torch.empty((linear.shape[0], 1), dtype=linear.dtype, device=device)
        return cls(plain, largest)


class Fp8Replay(Replay):
    """Makes the copies of a plan and quantises; without quantised matrices it is a `Replay`."""

    def __init__(
        self, plan: Fp8Plan, parameters: Parameters, kept: Mapping[str, _Landing] | None = None
    ) -> None:
        """Takes landings that were `kept`, or allocates what is needed for the largest buckets."""
        self._linears, parts_by_name = plan.linears, plan.parts()
        self._landings = kept or _landings(plan.linears, parts_by_name)
        plain = {name: landing.plain for name, landing in self._landings.items()}
        super().__init__(plan, {**parameters, **plain})
        # The parameters from which buckets can be read: landings only if nothing else takes them.
        self.readable = self._parameters if kept else parameters
        self._by_bucket: dict[int, list[_Part]] = defaultdict(list)
        self._ends: dict[int, list[str]] = defaultdict(list)
        for name, parts in parts_by_name.items():
            for part in parts:
                self._by_bucket[part.copy.bucket].append(part)
            self._ends[parts[-1].copy.bucket].append(name)
        self._unfinished = frozenset(self._by_bucket)

    @property
    def landing_bytes(self) -> int:
        """Memory of all landings."""
        storages = [landing.plain.untyped_storage() for landing in self._landings.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def run(self, place: int, buffer: torch.Tensor) -> None:
        """Makes the copies of a bucket, and quantises what is complete with it."""
        super().run(place, buffer)
        for part in self._by_bucket[place]:
            part.measure(buffer, self._landings[part.copy.parameter])
        for name in self._ends[place]:
            landing = self._landings[name]
            self._linears[name].quantise(landing.plain, landing.largest)


class Fp8Check(PlanCheck):
    """Proves the plan's quantised matrices too: quantised again, they equal the loader's bits."""

    def __init__(self, plan: Fp8Plan, parameters: Parameters) -> None:
        super().__init__(plan, parameters)
        self._keeps_plain = plan.keeps_plain
        # The plain weights of each matrix that was found, if the plan keeps them.
        self.kept: dict[str, _Landing] = {}
        self._linears, self._parts = plan.linears, plan.parts()
        self._arrived: dict[str, list[torch.Tensor]] = {name: [] for name in plan.linears}

    def add(self, place: int, buffer: torch.Tensor) -> None:
        """See `PlanCheck`; the memory of a quantised matrix is held until it was found."""
        for name, parts in self._parts.items():
            self._arrived[name] += [buffer for part in parts if part.copy.bucket == place]
        super().add(place, buffer)

    def failure(self) -> str | None:
        """See `PlanCheck`."""
        return super().failure() or next(iter(self._parts), None)

    def _take(self, place: int, buffer: torch.Tensor) -> None:
        copies = [c for c in self._plan.copies[place] if c.parameter not in self._linears]
        self._open += [(copy, buffer) for copy in copies]

    def _settle(self) -> None:
        super()._settle()
        for name, parts in list(self._parts.items()):
            if len(self._arrived[name]) == len(parts) and self._is_found(name, parts):
                del self._parts[name], self._arrived[name]

    def _is_found(self, name: str, parts: Sequence[_Part]) -> bool:
        live = self._linears[name]
        landing, anew = _Landing.of(live), live.like()
        for part, buffer in zip(parts, self._arrived[name], strict=True):
            typed = buffer.view(part.copy.dtype)
            source = part.copy.source.within(typed, int(typed.storage_offset()))
            landing.plain[part.rows].copy_(source)
            part.measure(buffer, landing)
        anew.quantise(landing.plain, landing.largest)
        if self._keeps_plain:
            self.kept[name] = landing
        return equal_bits(live.weight, anew.weight) and equal_bits(live.scale, anew.scale)


def _landings(
    linears: Mapping[str, Fp8Linear], parts: Mapping[str, Sequence[_Part]]
) -> dict[str, _Landing]:
    """Gives each matrix a landing that no other matrix has while it arrives."""
    spans = {name: (of[0].copy.bucket, of[-1].copy.bucket) for name, of in parts.items()}
    sizes: list[int] = []
    busy: list[int] = []
    slots: dict[str, int] = {}
    for name in sorted(spans, key=lambda name: spans[name]):
        first, last = spans[name]
        wanted = linears[name].plain_bytes
        free = [slot for slot, end in enumerate(busy) if end < first]
        if not free:
            free = [len(sizes)]
            sizes.append(0)
            busy.append(-1)
        # The smallest that is large enough, else the largest, which grows.
        slot = min(free, key=lambda slot: (sizes[slot] < wanted, abs(sizes[slot] - wanted)))
        sizes[slot] = max(sizes[slot], wanted)
        busy[slot], slots[name] = last, slot
    device = next(iter(linears.values())).weight.device if linears else None
    memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return {name: _Landing.of(linears[name], memory[slot]) for name, slot in slots.items()}
