"""The record of a model family: all that the programs know of one class of models.

A family is a class that config.json names; `families` has the records. Rules use these and name no
class. The defaults of a record describe a plain dense decoder: attention
with RoPE and a gated MLP.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

# A config.json, or a table within it.
Table: TypeAlias = Mapping[str, Any]
# The values that a field may have, None among them if it may be left out.
Values: TypeAlias = tuple[Any, ...]

OFF: Values = (None, False)
NONE: Values = (None,)
ONE: Values = (None, 1)
ZERO: Values = (None, 0)
ANY_BIAS: Values = (None, False, True)
# Fields of experts, in families without experts.
DENSE: Mapping[str, Values] = MappingProxyType({"num_experts": ZERO, "num_local_experts": ZERO})
# Fields of shared experts, in families without shared experts.
UNSHARED: Mapping[str, Values] = MappingProxyType({"shared_expert_intermediate_size": ZERO})

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The RoPE settings that a family may have, which all programs compute alike."""

    # The allowed kinds; empty means all that are known.
    kinds: tuple[str, ...] = ()
    # Keys that a RoPE table must have, and may have, in addition to the keys of its kind.
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    # Keys that a kind may have, in place of the usual ones.
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether only a part of each head is rotated.
    is_partial: bool = False
    # Whether each kind of layer may have a table of its own.
    is_by_layer: bool = False
    # Published files call the default kind by this name.
    alias: str = "default"
    # Yields the problems of one table in a config.json, given the kind.
    problems: Callable[[str, Table, Table], Iterator[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Facts of a family's mixture-of-experts layers."""

    # Whether files hold one tensor for all experts of a layer.
    is_fused: bool = False
    # Whether the weights of a token's experts add up to 1 if config.json does not say so.
    is_normalized: bool = False


@dataclass(frozen=True, kw_only=True)
class VisionFacts:
    """Facts of a family with a vision tower and three position axes (M-RoPE)."""

    # The token that stands for features of an image, unless config.json names another.
    image_token: int
    # The layers behind which the tower adds features, unless config.json names others.
    deep_layers: tuple[int, ...] = ()
    # Which of two tables says whether embeddings are tied: the outer, either, or both the same.
    ties: Literal["outer", "either", "same"] = "outer"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts of a family in vLLM: its module, its reply format and its weight loader."""

    # Module below `rollout_server.vllm` that has the family's class; "" if vLLM's class is used.
    module: str = ""
    # Whether the module starts CUDA, so that the server must not import it.
    starts_cuda: bool = False
    # Whether replies have the form of gpt-oss.
    is_harmony: bool = False
    # Whether vLLM's loader copies experts and sinks into parameters without loaders of their own.
    copies_parameters: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that the programs know of one class of models."""

    architecture: str = ""
    model_type: str = ""

    # Fields of config.json: fields with other allowed values than usual, fields that are read
    # although other families allow one value only, and fields that it must have.
    values: Mapping[str, Values] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = (FULL,)
    # Whether head_dim may differ from hidden_size / num_attention_heads.
    has_head_dim: bool = True
    # Whether embeddings are tied if config.json does not say so.
    is_tied: bool = False
    rope: Rope = Rope()
    # Rules between fields.
    problems: Callable[[Table], Iterator[str]] = lambda _: iter(())
    # How quantized files become files that can be trained.
    conversion: str = "take the folder in bfloat16"

    # Parts of a layer.
    query_norm: Literal["", "head", "whole"] = ""
    has_sinks: bool = False
    has_windows: bool = False
    has_latent_attention: bool = False
    # Whether some layers are gated delta nets, a kind of linear attention.
    is_delta: bool = False
    experts: Experts | None = None
    vision: VisionFacts | None = None

    engine: EngineFacts = EngineFacts()
    # Whether the learner has the engine's kernels for all of its layers.
    has_engine_bits: bool = False
    # Setting -> why it must be off. `FEATURES` has all such settings.
    cannot: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A setting that some families lack: its value when off, and its title in the models' table."""

    off: object
    title: str


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "model.dtype": Feature(off="bfloat16", title="float16"),
        "learner.parallel.etp": Feature(off=1, title="split experts"),
        "lora.rank": Feature(off=0, title="adapters"),
    }
)


def refusals(family: Family, name: str, chosen: Mapping[str, object]) -> Iterator[str]:
    """Yields a line, which names the class `name`, for each chosen setting that it cannot have."""
    for setting, value in chosen.items():
        off = FEATURES[setting].off
        if setting in family.cannot and value not in (off, None):
            shown = json.dumps(off)
            yield f"{setting} must be {shown} for a {name}: {family.cannot[setting]}, got {value!r}"
