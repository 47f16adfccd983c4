"""The ranks: torch.distributed, Megatron's parallel groups, seeds, and messages among ranks.

A trainer may have several sets of Megatron's groups over the same ranks, one in force at a time.
Megatron keeps its groups in the globals of one module, which layers, schedules, gradient sums and
Bridge's conversions read while they run. So a model of another layout runs inside `Grids.use`,
which sets these globals, and restores them afterwards. Random generators are shared: only new
parameters are drawn.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from slipstream.core.errors import ConfigError
from slipstream.core.machine.gpus import gpu_names
from slipstream.core.settings.parallel_rules import RankLayout
from slipstream.core.settings.sections import LearnerSection, ParallelSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.learner.trainer.ranks.cpu import shared_gloo_devices
from slipstream.learner.trainer.ranks.rendezvous import RankFlags, missing_variable, rendezvous
from slipstream.protocol.weights.nccl_group import set_nccl_environment
from torch import Tensor

_INT64 = torch.int64


@dataclass(frozen=True)
class Launch:
    """The values that torchrun sets for a rank."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Self:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK; raises ConfigError if one is missing."""
        try:
            return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
        except KeyError as error:
            raise missing_variable(error) from None


class Ranks:
    """All ranks of the trainer, and this process's position in the parallel groups.

    Unless a docstring says otherwise, the constructor and every method, except the properties, are
    collective: all ranks must call them in the same order. A collective call raises RuntimeError if
    a rank has died or is silent for `timeout_s`. The constructor raises ConfigError if the number
    of launched ranks is not `learner.world_size`, and the errors of `rendezvous`.
    """

    def __init__(
        self,
        launch: Launch,
        learner: LearnerSection,
        *,
        seed: int,
        activity: Activity | None = None,
    ) -> None:
        if launch.world_size != learner.world_size:
            raise ConfigError(
                f"learner.world_size is {learner.world_size}, but {launch.world_size} ranks started"
            )
        self.rank = launch.rank
        # Rank 0 gets the controller's orders and leads each publish.
        self.is_main = launch.rank == 0
        self.world_size = launch.world_size
        # Limit in seconds of one collective, and of a disk that does not answer.
        self.timeout_s = learner.timeout_s
        self.activity = activity or Activity()
        if learner.threads:
            torch.set_num_threads(learner.threads)
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            set_nccl_environment(os.environ)
            torch.cuda.set_device(launch.local_rank)
        timeout = timedelta(seconds=learner.timeout_s)
        store = rendezvous(launch.rank, launch.world_size, timeout)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        self.device = torch.device("cuda", launch.local_rank) if has_cuda else torch.device("cpu")
        # Setting and reading a flag is not collective.
        self.flags = RankFlags(store)
        self._parallel = learner.parallel
        self._grids = Grids(learner.parallel, timeout_s=learner.timeout_s, seed=seed)
        # Decisions travel over gloo on every device: they are small and need no stream.
        self._control = (
            dist.new_group(backend="gloo", timeout=timeout) if has_cuda else dist.group.WORLD
        )

    def placed(self, parallel: ParallelSection) -> Self:
        """Returns the same ranks in another layout, whose groups are created if necessary."""
        self._grids.create(parallel)
        other = copy.copy(self)
        other._parallel = parallel
        return other

    def in_force(self) -> AbstractContextManager[None]:
        """Puts this layout in force inside the context, as models of it need; not collective.

        Raises RuntimeError while a third layout is in force: see `Grids.use`.
        """
        return self._grids.use(self._parallel)

    @property
    def _groups(self) -> Megatron:
        return self._grids.groups(self._parallel)

    @property
    def dp_rank(self) -> int:
        return int(self._groups.get_data_parallel_rank())

    @property
    def dp_size(self) -> int:
        return int(self._groups.get_data_parallel_world_size())

    @property
    def tp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._groups.get_tensor_model_parallel_group()
        return group

    @property
    def cp_rank(self) -> int:
        return int(self._groups.get_context_parallel_rank())

    @property
    def cp_size(self) -> int:
        return int(self._groups.get_context_parallel_world_size())

    @property
    def cp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._groups.get_context_parallel_group()
        return group

    @property
    def token_group(self) -> dist.ProcessGroup:
        """The ranks that together have all tokens of a batch, each token once."""
        group: dist.ProcessGroup = self._groups.get_data_parallel_group(with_context_parallel=True)
        return group

    @property
    def stage(self) -> int:
        return int(self._groups.get_pipeline_model_parallel_rank())

    @property
    def counts(self) -> bool:
        """Whether sums over all ranks include this rank's statistics, so that tokens count once."""
        is_last_stage = bool(self._groups.is_pipeline_last_stage(ignore_virtual=True))
        return is_last_stage and self._groups.get_tensor_model_parallel_rank() == 0

    def has_first_copy(self, *, of_experts: bool) -> bool:
        """Whether no lower rank holds the same parameters (of experts or not); not collective."""
        if of_experts:
            return bool(self._groups.get_expert_data_parallel_rank() == 0)
        return bool(self._groups.get_data_parallel_rank(with_context_parallel=True) == 0)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Returns rank 0's bytes on every rank; the other ranks pass None."""
        assert (data is not None) == self.is_main
        if data is not None and self.world_size == 1:
            return data
        size = torch.tensor([len(data) if data is not None else 0], dtype=_INT64)
        dist.broadcast(size, src=0, group=self._control)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if buffer.numel():
            dist.broadcast(buffer, src=0, group=self._control)
        return data if data is not None else buffer.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [data]
        sizes = torch.zeros(self.world_size, dtype=_INT64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self._control)
        longest = max(1, int(sizes.max()))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=self._control)
        lengths = sizes.tolist()
        return [part.numpy().tobytes()[:size] for part, size in zip(parts, lengths, strict=True)]

    def sum(self, values: Tensor) -> Tensor:
        """Sums a CPU tensor over all ranks, in place, and returns it."""
        dist.all_reduce(values, group=self._control)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Sets a CPU tensor to its elementwise maximum over all ranks, in place, and returns it."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._control)
        return values

    @functools.cached_property
    def gpus(self) -> list[str]:
        return gpu_names(os.environ, self.device.index, 1) if self.device.type == "cuda" else []

    def describe(self, *, has_experts: bool) -> str:
        """Returns a text about the parallel groups, perhaps with experts'; not collective."""
        layout = RankLayout.of(self._parallel, self.world_size)
        layout_groups = layout.groups()
        groups = self._groups
        for name, ours in {
            "tp": groups.get_tensor_model_parallel_group(),
            "cp": groups.get_context_parallel_group(),
            "dp": groups.get_data_parallel_group(),
            "pp": groups.get_pipeline_model_parallel_group(),
            "etp": groups.get_expert_tensor_parallel_group(),
            "ep": groups.get_expert_model_parallel_group(),
            "expert_dp": groups.get_expert_data_parallel_group(),
        }.items():
            ranks = tuple(dist.get_process_group_ranks(ours))
            assert ranks in layout_groups[name], (
                f"Megatron's {name} group of rank {self.rank} is {ranks}"
            )
        return f"on {self.device.type}, {layout.describe(has_experts=has_experts)}"

    def close(self) -> None:
        """Destroys all process groups."""
        self._grids.close()
        dist.destroy_process_group()


# The list is shared: it only grows, and a change of the time limit must reach all groups.
_COMMON = frozenset({"_global_process_group_list"})


class Grids:
    """The parallel layouts of one trainer; the groups of each are created once, on all ranks.

    The layout `home` is in force while no other one is in use. The constructor, `create` and
    `close` are collective.
    """

    def __init__(self, home: ParallelSection, *, timeout_s: float, seed: int) -> None:
        self._timeout_s = timeout_s
        self._seed = seed
        self._nothing = _read_groups()
        self._states: dict[ParallelSection, dict[str, object]] = {}
        self._current: ParallelSection | None = None
        self.create(home)
        _globals().update(self._states[home])
        self._current = self._home = home

    def create(self, parallel: ParallelSection) -> None:
        """Creates the groups of a layout if it is new; the layout in force does not change."""
        if parallel in self._states:
            return
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        before = _read_groups()
        # Layouts get a dict each where Megatron fills one in place.
        nothing = {name: {} if value == {} else value for name, value in self._nothing.items()}
        _globals().update(nothing)
        with shared_gloo_devices():
            _parallel_state().initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                virtual_pipeline_model_parallel_size=parallel.vpp,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=parallel.etp,
                distributed_timeout_minutes=max(1, round(self._timeout_s / 60)),
            )
        torch.manual_seed(self._seed)
        model_parallel_cuda_manual_seed(self._seed)
        self._states[parallel] = _read_groups()
        _globals().update(before)

    def groups(self, parallel: ParallelSection) -> Megatron:
        """Megatron's module with the groups; raises RuntimeError if another layout is in force."""
        if self._current != parallel:
            raise RuntimeError("a model was asked for its groups while another layout is in force")
        return _parallel_state()

    @contextlib.contextmanager
    def use(self, parallel: ParallelSection) -> Iterator[None]:
        """Puts a layout in force inside the context; does nothing if it already is.

        Raises RuntimeError if a layout other than this one and `home` is in force: contexts of two
        layouts other than `home` must not nest.
        """
        before = self._current
        if before == parallel:
            yield
            return
        if before != self._home:
            raise RuntimeError("a model was run while another layout than the policy's is in force")
        self._states[before] = _read_groups()
        _globals().update(self._states[parallel])
        self._current = parallel
        try:
            yield
        finally:
            self._states[parallel] = _read_groups()
            _globals().update(self._states[before])
            self._current = before

    def close(self) -> None:
        """Destroys the groups of all layouts; the caller destroys the default process group."""
        for state in self._states.values():
            _globals().update(state)
            _parallel_state().destroy_model_parallel()
        _globals().update(self._nothing)
        self._states = {}
        self._current = None


def known_globals() -> set[str]:
    """Returns the names of all globals in which Megatron's `parallel_state` keeps its groups."""
    return {
        name
        for name, value in _globals().items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


def _parallel_state() -> Megatron:
    """Returns Megatron's module with the groups; `cpu.install` must precede its import."""
    from megatron.core import parallel_state

    return parallel_state


def _globals() -> dict[str, object]:
    state: dict[str, object] = _parallel_state().__dict__
    return state


def _read_groups() -> dict[str, object]:
    return {name: _globals()[name] for name in known_globals() - _COMMON}
