"""Megatron's own settings, passed through by name and checked against its real fields."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import typing
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from slipstream.core.configuration.near_names import did_you_mean, near_names
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.untyped import Megatron

# Megatron's fields that must agree with groups, weights or the trainer's code. The value is the
# setting to change instead, None if there is none.
OWNED = {
    "tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "virtual_pipeline_model_parallel_size": "learner.parallel.vpp",
    "context_parallel_size": "learner.parallel.cp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "expert_tensor_parallel_size": "learner.parallel.etp",
    "sequence_parallel": "learner.parallel.sequence_parallel",
    "use_distributed_optimizer": "learner.use_distributed_optimizer",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "num_layers": "model.path",
    "hidden_size": "model.path",
    "ffn_hidden_size": "model.path",
    "num_attention_heads": "model.path",
    "num_query_groups": "model.path",
    "kv_channels": "model.path",
    "vocab_size": "model.path",
    "num_moe_experts": "model.path",
    "moe_ffn_hidden_size": "model.path",
    "moe_router_topk": "model.path",
    "rotary_base": "model.path",
    "share_embeddings_and_output_weights": "model.path",
    "lr": "algorithm.learning_rate",
    "calculate_per_token_loss": None,
    # `logprobs` replaces Megatron's projection to the vocabulary.
    "defer_embedding_wgrad_compute": None,
    "average_in_collective": None,
    "variable_seq_lengths": None,
    "perform_initialization": None,
    "transformer_layer_spec": None,
    "finalize_model_grads_func": None,
    "grad_scale_func": None,
    "grad_sync_func": None,
    "param_sync_func": None,
    "init_method": None,
    "embedding_init_method": None,
    "output_layer_init_method": None,
    "timers": None,
    "cache_mla_latents": None,
    "_cpu_offloading_context": None,
    "_pg_collection": None,
    # With asynchronous sends an output would be freed before it is sent.
    "deallocate_pipeline_outputs": None,
    "no_sync_func": None,
}


def passed_through(
    target: Megatron, settings: Mapping[str, JsonValue], *, section: str
) -> dict[str, object]:
    """Returns the values of `settings` for the dataclass (or instance) `target`.

    Raises ConfigError for an unknown key, with the nearest names. Raises it too for a key that the
    trainer sets itself, and for a value of another type than the field's. Names of torch's element
    types and of an enum's members become these objects.
    """
    hints = typing.get_type_hints(target if isinstance(target, type) else type(target))
    fields = [field.name for field in dataclasses.fields(target) if field.init]
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in fields:
            raise ConfigError(f"unknown key {section}.{key}{_hint(key, fields)}")
        if key in OWNED:
            raise ConfigError(f"{section}.{key} cannot be passed through: {_rule(key)}")
        values[key] = _typed(value, hints[key], f"{section}.{key}")
    return values


def _rule(key: str) -> str:
    ours = OWNED[key]
    return f"set {ours} instead" if ours else "the trainer depends on its value"


def _hint(key: str, fields: Sequence[str]) -> str:
    near = near_names(key, fields)
    if near and near[0] in OWNED:
        return f"; {near[0]!r} cannot be passed through: {_rule(near[0])}"
    near = [name for name in near if name not in OWNED]
    return f"; {did_you_mean(near)}" if near else ""


def _typed(value: JsonValue, hint: Megatron, where: str) -> object:
    """Returns `value` checked against the type `hint`: a dataclass itself would take anything."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in hint.__members__:
            raise ConfigError(
                f"{where} must be one of {', '.join(hint.__members__)}, got {value!r}"
            )
        return hint[str(value)]
    # The name does not tell: moe_router_dtype, for example, is a string.
    if "torch.dtype" in str(hint):
        found = vars(torch).get(value) if isinstance(value, str) else None
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"{where}: {value!r} is no element type of torch")
        return found
    adapter = TypeAdapter[object](hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        # JSON has no tuples: a list stands for a tuple.
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        rules = dict.fromkeys(e["msg"].removeprefix("Input should be ") for e in error.errors())
        raise ConfigError(f"{where} must be {' or '.join(rules)}, got {value!r}") from None
    return value


@contextlib.contextmanager
def refusals_of(section: str) -> Iterator[None]:
    """Turns an error of Megatron's objects about their values into a ConfigError of one line."""
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{section}: Megatron refuses it: {said}") from error
