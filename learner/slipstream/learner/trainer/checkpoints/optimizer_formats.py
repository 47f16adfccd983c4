"""Conversion of optimizer state: saved with the distributed optimizer, loaded without, or reverse.

Both kinds write whole tensors under a parameter's own name. They differ in the name of the float32
copy of the weights, and in whether float32 weights have such a copy. The structure around the
tensors differs too. Import it after `cpu.install`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer.untyped import Megatron
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# Names of the float32 copy of a weight in both kinds.
_DISTRIBUTED_COPY = "optimizer.state.param."
_PLAIN_COPY = "optimizer.state.fp32_param."
_STATE = "optimizer.state."
_SCALER = "grad_scaler"

# Nested dicts and lists, with Megatron's sharded tensors as leaves.
Tree: TypeAlias = Any
Load = Callable[[dict[str, Tree]], dict[str, Tree]]


def is_distributed(optimizer: Megatron) -> bool:
    """Whether the state of `optimizer` is split over data-parallel ranks."""
    return any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers)


def was_distributed(saved: Tree) -> bool:
    """Whether `saved`, the structure around an optimizer's tensors, is of the distributed kind."""
    if isinstance(saved, Mapping):
        return "param_state_sharding_type" in saved or any(map(was_distributed, saved.values()))
    return isinstance(saved, list) and any(map(was_distributed, saved))


def check_convertible(optimizer: Megatron, index: Metadata, name: str) -> None:
    """Raises CheckpointError for state that only the same kind of optimizer can load."""
    settings = optimizer.config
    for setting in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(settings, setting):
            raise CheckpointError(
                "learner.use_distributed_optimizer must be as it was when the checkpoint was "
                f"written, because learner.optimizer.{setting} is set"
            )
    for key, entry in index.state_dict_metadata.items():
        if key.startswith(name + _STATE) and isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            if dtype is not torch.float32:
                raise CheckpointError(
                    "learner.use_distributed_optimizer must be as it was when the checkpoint was "
                    f"written: {key} is {dtype}, only float32 is converted"
                )


def load_converted(optimizer: Megatron, wanted: Tree, saved: Tree, load: Load) -> Tree:
    """Returns the state dict for `optimizer`, read by `load` from files of the other kind.

    `wanted` is the optimizer's own sharded state, `saved` the structure around the saved tensors.
    Settings of the parameter groups come from `wanted`, the number of steps and the scale of the
    loss from `saved`.
    """
    if not is_distributed(optimizer):
        state = _read(wanted, lambda key: key.replace(_PLAIN_COPY, _DISTRIBUTED_COPY), load)
    elif optimizer.config.bf16 or optimizer.config.fp16:
        state = _read(wanted, lambda key: key.replace(_DISTRIBUTED_COPY, _PLAIN_COPY), load)
    else:
        state = _read(_read(wanted, _all_but_copies, load), _weights_for_copies, load)
    _set_steps(state, _steps(saved))
    _set_scale(state, _scale(saved))
    return state


def _all_but_copies(key: str) -> str | None:
    return None if _DISTRIBUTED_COPY in key else key


def _weights_for_copies(key: str) -> str | None:
    """Returns a weight's key for its copy: float32 weights are their own copy.

    Other keys give None. Copies are read in a second pass: Megatron reads no tensor twice in one.
    """
    return key.replace(_DISTRIBUTED_COPY, "") if _DISTRIBUTED_COPY in key else None


def _read(wanted: Tree, source: Callable[[str], str | None], load: Load) -> Tree:
    """Reads each sharded leaf of `wanted` from its key by `source`; a leaf with None stays."""
    chosen = _chosen(wanted, source)
    return _filled(wanted, load({"converted": chosen})["converted"])


def _chosen(wanted: Tree, source: Callable[[str], str | None]) -> Tree:
    if isinstance(wanted, dict):
        pairs = ((key, _chosen(value, source)) for key, value in wanted.items())
        return {key: value for key, value in pairs if value is not None}
    if isinstance(wanted, list):
        # Indices of a list become keys, so that they stay the same when entries are left out.
        return _chosen(dict(enumerate(wanted)), source)
    if isinstance(wanted, ShardedBase):
        key = source(wanted.key)
        return None if key is None else replace(wanted, key=key)
    return wanted if isinstance(wanted, LocalNonpersistentObject) else None


def _filled(wanted: Tree, loaded: Tree) -> Tree:
    """Returns `wanted` with the entries of `loaded` in their places."""
    if loaded is None:
        return wanted
    if isinstance(wanted, dict):
        return {key: _filled(value, loaded.get(key)) for key, value in wanted.items()}
    if isinstance(wanted, list):
        return [_filled(value, loaded.get(place)) for place, value in enumerate(wanted)]
    return loaded


def _steps(saved: Tree) -> int:
    """Returns the largest number of steps in the parameter groups of a saved optimizer."""
    if isinstance(saved, Mapping):
        own = saved.get("step", 0)
        return max(int(own), *map(_steps, saved.values()), 0)
    return max(map(_steps, saved), default=0) if isinstance(saved, list) else 0


def _set_steps(state: Tree, steps: int) -> None:
    if isinstance(state, list):
        for value in state:
            _set_steps(value, steps)
    elif isinstance(state, dict):
        for group in state.get("param_groups", []):
            group["step"] = steps
        for value in state.values():
            _set_steps(value, steps)


def _scale(saved: Tree) -> Tree:
    """Returns the state of the loss's scaler, which all parts share; None without one."""
    if not isinstance(saved, Mapping):
        return next(filter(None, map(_scale, saved)), None) if isinstance(saved, list) else None
    return saved.get(_SCALER) or next(filter(None, map(_scale, saved.values())), None)


def _set_scale(state: Tree, scale: Tree) -> None:
    for part in state if isinstance(state, list) else state.values():
        if scale and isinstance(part, dict | list):
            _set_scale(part, scale)
    if isinstance(state, dict) and scale and _SCALER in state:
        state[_SCALER] = scale
