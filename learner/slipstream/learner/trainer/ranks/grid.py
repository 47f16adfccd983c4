"""Several sets of Megatron's parallel groups over the same ranks, one set in force at a time.

Megatron keeps its groups in the globals of one module, which layers, schedules, gradient sums and
Bridge's conversions read while they run. A model of another layout therefore runs inside
`Grid.use`. It sets all of these globals and the states of the random generators, and restores them
afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from slipstream.core.settings.config import ParallelSection
from slipstream.learner.trainer.ranks.cpu import shared_gloo_devices
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor

# This list is shared: it only grows, and a change of the time limit must reach all groups.
_COMMON = frozenset({"_global_process_group_list"})


@dataclass
class _State:
    """The values that Megatron reads from globals: groups, sizes, buffers, generators' states."""

    groups: dict[str, object]
    tracked: dict[str, object]
    generators: list[Tensor]


class Grids:
    """The layouts of one trainer; each distinct layout's groups are made once, on all ranks.

    The layout of `home` is in force while no other layout is in use. The constructor, `for_layout`
    and `close` are collective.
    """

    def __init__(self, home: ParallelSection, *, timeout_s: float, seed: int) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._seed = seed
        self._nothing = _read_groups()
        self._by_sizes: dict[ParallelSection, Grid] = {}
        self.current: Grid | None = None
        self.home = self.for_layout(home)
        _write(self.home.state)
        self.current = self.home

    def for_layout(self, parallel: ParallelSection) -> Grid:
        """Returns the groups of a layout, and makes them if new; the layout in force stays."""
        # Sequence parallelism has no groups of its own.
        sizes = parallel.model_copy(update={"sequence_parallel": False})
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = Grid(self, self._make(sizes))
        return self._by_sizes[sizes]

    def close(self) -> None:
        """Destroys the groups of all layouts; the caller destroys the process group."""
        from megatron.core import parallel_state

        for grid in self._by_sizes.values():
            _write(grid.state)
            parallel_state.destroy_model_parallel()
        _write_groups(self._nothing)
        self._by_sizes, self.current = {}, None

    def _make(self, sizes: ParallelSection) -> _State:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        before = _read() if self.current is not None else None
        # Each layout gets its own dict where Megatron fills one in place.
        _write_groups({name: {} if value == {} else value for name, value in self._nothing.items()})
        with shared_gloo_devices():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tp,
                pipeline_model_parallel_size=sizes.pp,
                virtual_pipeline_model_parallel_size=sizes.vpp,
                context_parallel_size=sizes.cp,
                expert_model_parallel_size=sizes.ep,
                expert_tensor_parallel_size=sizes.etp,
                distributed_timeout_minutes=max(1, round(self._timeout.total_seconds() / 60)),
            )
        torch.manual_seed(self._seed)
        model_parallel_cuda_manual_seed(self._seed)
        made = _read()
        if before is not None:
            _write(before)
        return made


class Grid:
    """One layout of all ranks; `Grids.for_layout` makes it."""

    def __init__(self, grids: Grids, state: _State) -> None:
        self._grids = grids
        self.state = state

    @property
    def groups(self) -> Megatron:
        """Megatron's module of groups; RuntimeError while another layout is in force."""
        from megatron.core import parallel_state

        if self._grids.current is not self:
            raise RuntimeError("a model was asked for its groups while another layout is in force")
        return parallel_state

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Puts this layout in force; does nothing if it already is.

        Raises RuntimeError while a third layout is in force: uses of two layouts other than `home`
        may follow each other, but not nest.
        """
        grids = self._grids
        before = grids.current
        if before is self:
            yield
            return
        if before is not grids.home:
            raise RuntimeError("a model was run while another layout than the policy's is in force")
        grids.home.state = _read()
        _write(self.state)
        grids.current = self
        try:
            yield
        finally:
            self.state = _read()
            _write(grids.home.state)
            grids.current = grids.home


def known_globals() -> set[str]:
    """Returns the names of Megatron's globals, both swapped ones and those that layouts share."""
    from megatron.core import parallel_state

    return {
        name
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


def _read_groups() -> dict[str, object]:
    from megatron.core import parallel_state

    return {name: vars(parallel_state)[name] for name in known_globals() - _COMMON}


def _write_groups(groups: dict[str, object]) -> None:
    from megatron.core import parallel_state

    vars(parallel_state).update(groups)


def _read() -> _State:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    generators = [torch.get_rng_state()]
    if torch.cuda.is_available():
        generators.append(torch.cuda.get_rng_state())
    return _State(_read_groups(), get_cuda_rng_tracker().get_states(), generators)


def _write(state: _State) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    _write_groups(state.groups)
    get_cuda_rng_tracker().set_states(state.tracked)
    torch.set_rng_state(state.generators[0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state.generators[1])
