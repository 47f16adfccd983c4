"""The work of a model's own loader, recorded once as copies and replayed.

`record` runs `load_weights` over buckets without changing anything, and records every copy from a
bucket into a parameter; for a fused or sharded parameter it is a copy of slices. A plan is valid
only if its copies write every element of every parameter exactly once. `PlanCheck` compares, bit by
bit, the parameters that the loader filled with the result of these copies; `PlannedCopies` makes
the copies.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from slipstream.protocol.weights.buckets import Bucket
from torch.utils._python_dispatch import TorchDispatchMode

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Parameters = Mapping[str, torch.Tensor]
# A destination and its source; several of both.
_Pair = tuple[torch.Tensor, torch.Tensor]
_Together = tuple[list[torch.Tensor], list[torch.Tensor]]

# Most stretches of memory that one copy operation may write; beyond it a plan is not worth it.
_MAX_RUNS = 1 << 24
# Size from which a tensor is copied separately: its copy takes longer than starting the next.
_LARGE_BYTES = 16 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotCopied(Exception):  # noqa: N818 - says why a plan is impossible
    """Raised if the loader does more than copy; the message names the parameter or layer."""


@dataclass(frozen=True)
class View:
    """A strided part of a storage; `offset` and `strides` count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Returns the view that describes which part of its storage `tensor` covers."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def within(self, tensor: torch.Tensor, base: int = 0) -> torch.Tensor:
        """Returns this part of `tensor`'s storage as a tensor; offsets count from `base`."""
        return torch.as_strided(
            tensor,
            self.shape,
            self.strides,
            base + self.offset,
        )

    def runs(self) -> NDArray[np.int64]:
        """Returns each stretch of adjacent elements as a row (start, end): [stretches, 2].

        Raises NotCopied if there are too many stretches.
        """
        dims = [d for d in zip(self.shape, self.strides, strict=True) if d[0] != 1]
        dims.sort(key=lambda dim: dim[1])
        length = 1
        while dims and dims[0][1] == length:
            length *= dims.pop(0)[0]
        starts = np.full(1, self.offset, dtype=np.int64)
        for size, stride in dims:
            if len(starts) * size > _MAX_RUNS:
                raise NotCopied(f"a copy writes more than {_MAX_RUNS} stretches")
            steps = np.arange(size, dtype=np.int64) * stride
            starts = (starts[:, None] + steps).reshape(-1)
        return np.stack([starts, starts + length], axis=1) if length else np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class Copy:
    """One copy operation of a `CopyPlan`: from a part of a bucket to a part of a parameter.

    `source` counts elements of `dtype` from the start of the bucket, `destination` elements of the
    parameter's storage from its start.
    """

    dtype: torch.dtype
    source: View
    parameter: str
    destination: View


# All copy operations of an update, grouped by bucket; valid for these buckets only.
CopyPlan: TypeAlias = tuple[tuple[Copy, ...], ...]


def cut(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the view of every tensor in a bucket's bytes."""
    for span in bucket.spans:
        tensor = span.tensor
        data = buffer[span.offset_bytes : span.offset_bytes + tensor.num_bytes]
        yield tensor.name, data.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def record(
    load_weights: LoadWeights,
    parameters: Parameters,
    buckets: Sequence[Bucket],
    device: torch.device,
) -> CopyPlan:
    """Returns the copies that `load_weights` makes into `parameters`; writes nothing.

    Allocates memory of the largest bucket's size on `device`. Raises NotCopied if the loader does
    anything else to a parameter, or does not write each of its elements exactly once.
    """
    empty = [name for name, tensor in parameters.items() if not tensor.numel()]
    if empty:
        raise NotCopied(f"{empty[0]} is kept in another form")
    room = torch.empty(max(b.num_bytes for b in buckets), dtype=torch.uint8, device=device)
    recorder = _Recorder(parameters, room)
    plan = []
    for bucket in buckets:
        recorder.copies = []
        with recorder:
            load_weights(cut(room, bucket))
        plan.append(tuple(recorder.copies))
    names = {_storage(tensor): name for name, tensor in parameters.items()}
    expected: dict[str, set[View]] = {name: set() for name in names.values()}
    for tensor in parameters.values():
        expected[names[_storage(tensor)]].add(View.of(tensor))
    written: dict[str, list[View]] = {name: [] for name in expected}
    for copy in itertools.chain(*plan):
        written[copy.parameter].append(copy.destination)
    for name, view in recorder.constants:
        written[name].append(view)
    for name, views in expected.items():
        if not written[name]:
            raise NotCopied(f"{name} is not written")
        got, once = _merge(written[name])
        if not once:
            raise NotCopied(f"parts of {name} are written more than once")
        if not np.array_equal(got, _merge(views)[0]):
            raise NotCopied(f"parts of {name} are not written")
    return tuple(plan)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes to parameters instead of executing them."""

    def __init__(self, parameters: Parameters, room: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_storage(tensor): name for name, tensor in parameters.items()}
        self._room = _storage(room)
        # The copies from the present bucket.
        self.copies: list[Copy] = []
        # Parts that the loader fills with the same constant at every load: padding.
        self.constants: list[tuple[str, View]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch gives no type
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Records or executes an operation; torch calls it for every operation below autograd."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            # A parameter that is written with this value would look like a constant.
            raise NotCopied("the loader reads the value of an element")
        keywords = kwargs or {}
        written = None
        for place, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            value = args[place] if place < len(args) else keywords.get(argument.name)
            if info is None or not info.is_write or not isinstance(value, torch.Tensor):
                continue
            if _storage(value) == self._room:
                raise NotCopied(f"the loader changes a bucket by {func}")
            if _storage(value) in self._names:
                written = value
                break
        if written is None:
            if func is torch.ops.aten.copy_.default and _storage(args[1]) == self._room:
                raise NotCopied("a bucket is copied to a tensor that is no parameter")
            return func(*args, **keywords)
        name = self._names[_storage(written)]
        if func is torch.ops.aten.copy_.default:
            source = args[1]
            if _storage(source) != self._room:
                raise NotCopied(
                    f"{name} is not written with a bucket's data but with a result of them"
                )
            if written.numel():
                copy = Copy(
                    dtype=source.dtype,
                    source=View.of(source.expand(written.shape)),
                    parameter=name,
                    destination=View.of(written),
                )
                self.copies.append(copy)
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            if written.numel():
                self.constants.append((name, View.of(written)))
        else:
            raise NotCopied(f"{name} is changed by {func}")
        return written


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _merge(views: Iterable[View]) -> tuple[NDArray[np.int64], bool]:
    """Returns the sorted union of all runs, with adjacent runs joined, and whether none overlap."""
    runs = np.concatenate([view.runs() for view in views])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs[:, 1])
    apart = runs[1:, 0] > ends[:-1]
    once = bool((runs[1:, 0] >= ends[:-1]).all())
    starts = runs[np.concatenate([[True], apart]), 0]
    return np.stack([starts, ends[np.concatenate([apart, [True]])]], axis=1), once


class PlanCheck:
    """Compares the parameters that the loader filled with the result of a plan's copies.

    check = PlanCheck(plan, parameters)
    check.add(place, buffer)  # for each bucket, after the loader was given it
    check.failure()  # after the loader has finished

    The loader may finish a parameter several buckets later. So a bucket's memory is held until the
    parameters equal every copy that the plan makes from it.
    """

    def __init__(self, plan: CopyPlan, parameters: Parameters) -> None:
        self._plan = plan
        self._parameters = parameters
        self._open: list[tuple[Copy, torch.Tensor]] = []

    def add(self, place: int, buffer: torch.Tensor) -> None:
        """Adds a bucket that the loader was given; `buffer` must not be written any more."""
        self._open += [(copy, buffer) for copy in self._plan[place]]
        self._settle()

    def failure(self) -> str | None:
        """Returns the name of a parameter that the plan gets wrong, or None."""
        self._settle()
        return self._open[0][0].parameter if self._open else None

    def _settle(self) -> None:
        self._open = [
            (copy, buffer) for copy, buffer in self._open if not self._is_made(copy, buffer)
        ]

    def _is_made(self, copy: Copy, buffer: torch.Tensor) -> bool:
        """Whether the destination has the bits that the copy would give it."""
        destination, source = _pair(copy, buffer, self._parameters)
        bits = _BITS[destination.element_size()]
        expected = source.to(destination.device, destination.dtype)
        return torch.equal(destination.view(bits), expected.view(bits))


def _pair(copy: Copy, buffer: torch.Tensor, parameters: Parameters) -> _Pair:
    destination = copy.destination.within(parameters[copy.parameter].data)
    typed = buffer.view(copy.dtype)
    return destination, copy.source.within(typed, int(typed.storage_offset()))


class PlannedCopies:
    """Carries out a `CopyPlan`: copies buckets to the parameters."""

    def __init__(self, plan: CopyPlan, parameters: Parameters) -> None:
        self._plan = plan
        self._parameters = parameters
        # By bucket and buffer: destinations and sources that one kernel copies, and single pairs.
        self._views: dict[tuple[int, int], tuple[list[_Together], list[_Pair]]] = {}

    def prepare(self, place: int, buffer: torch.Tensor) -> None:
        """Prepares all views for a bucket that will arrive in `buffer`."""
        key = place, buffer.data_ptr()
        if key in self._views:
            return
        # A kernel copies many tensors only if all of them are plain and alike. Large ones are
        # copied one by one, by the GPU's own copy: that kernel reaches two thirds of its speed.
        together: defaultdict[torch.dtype, _Together] = defaultdict(lambda: ([], []))
        single: list[_Pair] = []
        for copy in self._plan[place]:
            destination, source = pair = _pair(copy, buffer, self._parameters)
            alike = destination.is_contiguous() and source.is_contiguous()
            alike &= destination.dtype == source.dtype
            if alike and destination.nbytes < _LARGE_BYTES:
                destinations, sources = together[source.dtype]
                destinations.append(destination)
                sources.append(source)
            else:
                single.append(pair)
        self._views[key] = list(together.values()), single

    def run(self, place: int, buffer: torch.Tensor) -> None:
        """Enqueues the copy operations of a bucket on the current stream."""
        self.prepare(place, buffer)
        together, single = self._views[place, buffer.data_ptr()]
        for destinations, sources in together:
            torch._foreach_copy_(destinations, sources)
        for destination, source in single:
            destination.copy_(source)

    def forget_buffers(self) -> None:
        """Drops the views of `prepare`, because their memory will not be used again."""
        self._views.clear()
