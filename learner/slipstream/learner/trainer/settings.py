"""Megatron's own settings, passed through by name and checked against its real fields."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from pydantic import JsonValue
from slipstream.protocol.errors import ConfigError

# An object of Megatron's or of transformers': untyped for us.
Megatron: TypeAlias = Any

# Sizes that must agree with the process groups: they have settings of our own.
_OWNED = {
    "tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "virtual_pipeline_model_parallel_size": "learner.parallel.vpp",
    "context_parallel_size": "learner.parallel.cp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "expert_tensor_parallel_size": "learner.parallel.etp",
    "sequence_parallel": "learner.parallel.sequence_parallel",
    "use_distributed_optimizer": "learner.use_distributed_optimizer",
    "params_dtype": "model.dtype",
    "lr": "algorithm.learning_rate",
    "calculate_per_token_loss": None,
    # The projection to the vocabulary is not Megatron's.
    "defer_embedding_wgrad_compute": None,
    "average_in_collective": None,
}


def passed_through(
    target: Megatron, settings: Mapping[str, JsonValue], *, section: str
) -> dict[str, object]:
    """The values of `settings` for the dataclass (or instance) `target`.

    ConfigError for a key that it does not have, with the nearest one, and for a key that the
    trainer decides itself. Names of torch's element types become the types.
    """
    fields = {field.name: field for field in dataclasses.fields(target) if field.init}
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown key {section}.{key}{hint}")
        if key in _OWNED:
            ours = _OWNED[key]
            rule = f"set {ours} instead" if ours else "the trainer depends on its value"
            raise ConfigError(f"{section}.{key} cannot be passed through: {rule}")
        values[key] = _dtype(value) if "dtype" in key and isinstance(value, str) else value
    return values


def _dtype(name: str) -> torch.dtype:
    found: object = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} is no element type of torch")
    return found
