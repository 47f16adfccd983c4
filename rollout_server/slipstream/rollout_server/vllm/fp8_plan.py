"""A copy plan for a model some of whose matrices vLLM keeps in FP8.

Such a matrix is copied to a landing, an unquantised buffer outside the engine's weights. After the
last copy the landing is quantised into the live matrix, as vLLM's loader would do it. Matrices that
arrive at different times share a landing.

vLLM keeps such a layer's matrix transposed in float8, with a scale for each of its rows. No
checkpoint has that form: a loader needs the unquantised matrix.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import get_fp8_min_max
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

# Elements that are divided by scales at one time: the quotients take four bytes each.
_CHUNK = 16 << 20
# vLLM divides the smallest scale of a row by this (0.32.0).
_SMALLEST = 512


@dataclass(frozen=True)
class Fp8Linear:
    """Buffers of a quantised matrix [rows, columns] and its scales [rows, 1]."""

    weight: torch.Tensor
    scale: torch.Tensor
    # The element type before quantising.
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def plain_bytes(self) -> int:
        return self.weight.numel() * self.dtype.itemsize

    def quantise(self, plain: torch.Tensor, largest: torch.Tensor) -> None:
        """Quantises `plain` into the buffers, bit for bit like vLLM's loader; never synchronises.

        `largest` [rows, 1] has the greatest absolute value of each whole row, even if a tensor
        parallel worker holds only a part of the row.
        """
        low, high = get_fp8_min_max()
        # A tensor on the device: a number would be multiplied by its reciprocal.
        most = torch.full((), high, dtype=torch.float32, device=plain.device)
        scales = largest.to(torch.float32) / most
        self.scale.copy_(scales.clamp_min(1.0 / (most * _SMALLEST)))
        chunk = max(1, _CHUNK // plain.shape[1])
        for start in range(0, plain.shape[0], chunk):
            rows = slice(start, start + chunk)
            self.weight[rows].copy_((plain[rows] / self.scale[rows]).clamp_(low, high))


def fp8_linears(model: torch.nn.Module) -> dict[str, Fp8Linear]:
    """Returns the engine's live buffers of each quantised weight, by name."""
    return {name: _live(name, layer) for name, layer in _layers(model)}


@contextlib.contextmanager
def loadable(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the parameters of `model`, by name, in the form that its loader takes: unquantised.

    In the block, unquantised stand-ins in main memory replace quantised weights. The caller must
    not write to these stand-ins: their pages are not allocated.
    """
    kept = []
    try:
        for name, layer in _layers(model):
            kept.append((layer, dict(layer._parameters)))
            with torch.device("cpu"):
                plain = materialize_meta_tensor(_as_loaded(name, layer))
            # The weight's own loader, without vLLM's collecting of a whole layer around it.
            while plain.weight_loader.__name__ == "online_process_loader":
                plain.weight_loader = plain.weight_loader.__wrapped__
            del layer._parameters["weight_scale"]
            layer._parameters["weight"] = plain
        yield dict(model.named_parameters())
    finally:
        for layer, parameters in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        # Wrappers for adapters have the method of their layer too, as a property.
        if type(vars(layer).get("quant_method")) is Fp8PtpcOnlineLinearMethod:
            yield f"{name}.weight", layer


def _as_loaded(name: str, layer: Any) -> Any:  # noqa: ANN401 - vLLM's classes of parameters
    """Returns the weight of `layer` on the meta device, in the form that vLLM's loader takes."""
    found = get_layerwise_info(layer).restore_metadata[0].get("weight")
    if found is None or found.dim() != 2:
        raise NotCopied(f"{name} is loaded in another form than as a matrix")
    return restore_layer_refs(found, layer)


def _live(name: str, layer: Any) -> Fp8Linear:  # noqa: ANN401 - a layer of vLLM
    before = _as_loaded(name, layer)
    rows, columns = before.shape
    weight, scale = layer.weight.data, layer.weight_scale.data
    if weight.dtype != current_platform.fp8_dtype() or weight.stride(0) != 1:
        raise NotCopied(f"{name} is packed for {type(layer.quant_method.fp8_linear).__name__}")
    # vLLM pads both sides of a matrix to multiples of 16; the padding stays as it is.
    return Fp8Linear(weight.t()[:rows, :columns], scale[:rows], before.dtype)


@dataclass(frozen=True)
class Fp8Plan(CopyPlan):
    """A copy plan and the live matrices that are quantised after its copies, by name."""

    linears: Mapping[str, Fp8Linear]

    def __post_init__(self) -> None:
        """Raises NotCopied unless copies of quantised matrices fill whole rows."""
        self.parts()

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
    """The copy of a part of a matrix into its landing, and the rows that this part completes."""

    copy: Copy
    rows: slice
    # Whole rows in the bucket, of which the worker may copy only a part: all workers then compute
    # the same scales.
    measured: View

    @classmethod
    def of(cls, copy: Copy, plan: CopyPlan, linear: Fp8Linear) -> _Part:
        """Returns the part for a copy into the matrix `linear`.

        Raises NotCopied unless the copy fills whole rows from rows of one tensor.
        """
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
        """Writes each row's greatest absolute value to `landing.largest`, after the copy."""
        found = landing.plain[self.rows]
        if self.measured != self.copy.source:
            # Other workers copy the other parts. The bucket may be in main memory, slow to read.
            typed = buffer.view(self.copy.dtype)
            found = self.measured.within(typed, int(typed.storage_offset())).to(found.device)
        low, high = found.aminmax(dim=1, keepdim=True)
        landing.largest[self.rows].copy_(torch.maximum(low.abs(), high.abs()))


@dataclass(frozen=True)
class _Landing:
    """The unquantised memory of one matrix, and the greatest absolute value of each row."""

    plain: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, linear: Fp8Linear, memory: torch.Tensor | None = None) -> _Landing:
        """Returns a landing at the start of `memory`, or in new memory if that is None."""
        device, num_bytes = linear.weight.device, linear.plain_bytes
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        plain = memory[:num_bytes].view(linear.dtype).view(linear.shape)
        largest = torch.empty((linear.shape[0], 1), dtype=linear.dtype, device=device)
        return cls(plain, largest)


class Fp8Replay(Replay):
    """Carries out an `Fp8Plan`: a `Replay` that also quantises matrices, if the plan has any."""

    def __init__(self, plan: Fp8Plan, parameters: Parameters) -> None:
        """Allocates the landings, which matrices share."""
        self._linears, parts_by_name = plan.linears, plan.parts()
        self._landings = _landings(plan.linears, parts_by_name)
        plain = {name: landing.plain for name, landing in self._landings.items()}
        super().__init__(plan, {**parameters, **plain})
        self._by_bucket: dict[int, list[_Part]] = defaultdict(list)
        self._ends: dict[int, list[str]] = defaultdict(list)
        for name, parts in parts_by_name.items():
            for part in parts:
                self._by_bucket[part.copy.bucket].append(part)
            self._ends[parts[-1].copy.bucket].append(name)

    @property
    def landing_bytes(self) -> int:
        storages = [landing.plain.untyped_storage() for landing in self._landings.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values())

    def run(self, place: int, buffer: torch.Tensor) -> None:
        """Copies a bucket to the parameters, and quantises the matrices that this completes."""
        super().run(place, buffer)
        for part in self._by_bucket[place]:
            part.measure(buffer, self._landings[part.copy.parameter])
        for name in self._ends[place]:
            landing = self._landings[name]
            self._linears[name].quantise(landing.plain, landing.largest)


class Fp8Check(PlanCheck):
    """A `PlanCheck` that also compares the loader's FP8 matrices with the plan's, bit by bit."""

    def __init__(self, plan: Fp8Plan, parameters: Parameters) -> None:
        super().__init__(plan, parameters)
        self._linears, self._parts = plan.linears, plan.parts()
        self._arrived: dict[str, list[torch.Tensor]] = {name: [] for name in plan.linears}

    def add(self, place: int, buffer: torch.Tensor) -> None:
        """Adds a bucket as in `PlanCheck`; holds the buckets of an FP8 matrix until its check."""
        for name, parts in self._parts.items():
            self._arrived[name] += [buffer for part in parts if part.copy.bucket == place]
        super().add(place, buffer)

    def failure(self) -> str | None:
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
        weight = torch.empty(live.shape, dtype=live.weight.dtype, device=live.weight.device)
        anew = Fp8Linear(weight, torch.empty_like(live.scale), live.dtype)
        landing = _Landing.of(live)
        for part, buffer in zip(parts, self._arrived[name], strict=True):
            typed = buffer.view(part.copy.dtype)
            source = part.copy.source.within(typed, int(typed.storage_offset()))
            landing.plain[part.rows].copy_(source)
            part.measure(buffer, landing)
        anew.quantise(landing.plain, landing.largest)
        return equal_bits(live.weight, anew.weight) and equal_bits(live.scale, anew.scale)


def _landings(
    linears: Mapping[str, Fp8Linear], parts: Mapping[str, Sequence[_Part]]
) -> dict[str, _Landing]:
    """Returns each matrix's landing; matrices that arrive at different times may share memory."""
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
        # Takes the smallest slot that is large enough, or else the largest slot, which grows.
        slot = min(free, key=lambda slot: (sizes[slot] < wanted, abs(sizes[slot] - wanted)))
        sizes[slot] = max(sizes[slot], wanted)
        busy[slot], slots[name] = last, slot
    device = next(iter(linears.values())).weight.device if linears else None
    memory = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    return {name: _Landing.of(linears[name], memory[slot]) for name, slot in slots.items()}
