"""The families of models that can be trained: what a record tells, and all records by class.

A family is a class that config.json names. Rules use its record and name no class. The defaults of
a record describe a plain dense decoder: attention with RoPE and a gated MLP.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


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
    # Whether PEFT finds adapters of single experts in transformers' model.
    is_found_by_peft: bool = True


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
    has_windows: bool = False
    # Whether some layers are gated delta nets, a kind of linear attention.
    is_delta: bool = False
    experts: Experts | None = None
    vision: VisionFacts | None = None
    # Folder of the decoder's tensors in files that hold towers too, which are never loaded and are
    # exported as they are; "" if all tensors of the files are trained.
    decoder_folder: str = ""

    engine: EngineFacts = EngineFacts()
    # Whether the learner has the engine's kernels for all of its layers.
    has_engine_bits: bool = False
    # Setting -> why it must be off. `FEATURES` has all such settings.
    cannot: Mapping[str, str] = field(default_factory=dict)


# Settings that some families lack, with the values that switch them off.
FEATURES: Mapping[str, object] = MappingProxyType(
    {"model.dtype": "bfloat16", "learner.parallel.etp": 1, "lora.publish": "merged"}
)


def refusals(family: Family, name: str, chosen: Mapping[str, object]) -> Iterator[str]:
    """Yields a line, which names the class `name`, for each chosen setting that it cannot have."""
    for setting, value in chosen.items():
        off = FEATURES[setting]
        if setting in family.cannot and value not in (off, None):
            shown = json.dumps(off)
            yield f"{setting} must be {shown} for a {name}: {family.cannot[setting]}, got {value!r}"


# Routers with a sigmoid: the weights of a token's experts always add up to routed_scaling_factor.
_SIGMOID: Mapping[str, Values] = {
    "norm_topk_prob": (None, True),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}
_READ_OF_EXPERTS = (
    "n_routed_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    # The layers that predict further tokens are neither loaded nor sampled from.
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
_READ = (
    *_READ_OF_EXPERTS,
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
)
_DEEPSEEK: Mapping[str, Values] = {
    **_SIGMOID,
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    # transformers norms latent vectors with 1e-6, vLLM with the value in config.json.
    "rms_norm_eps": (None, 1e-6, 1e-5),
}
_GELU: Values = (None, "gelu_pytorch_tanh")
# Windows are in all layers or in none.
_VALUES = {**DENSE, "layer_types": NONE, "use_sliding_window": NONE}
_DEEP_LAYERS = (8, 16, 24)
_IMAGE_TOKEN = 151655
_READ_OF_DELTA_NETS = (
    "full_attention_interval",
    "partial_rotary_factor",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
# vLLM reads whether attention is gated; transformers always gates it.
_GATED = {"attn_output_gate": (None, True)}
_GATED_MIXTURE = {
    **_GATED,
    "num_local_experts": ZERO,
    # The weights of a token's experts always add up to 1.
    "norm_topk_prob": (None, True),
}
_AXES = ("mrope_section", "mrope_interleaved")
_SEEING_ROPE = Rope(kinds=("default",), alias="mrope", needed=_AXES[:1], optional=_AXES[1:])


def _rope_problems(kind: str, table: Table, _: Table) -> Iterator[str]:
    """Yields one line for each RoPE setting that a model with latent attention cannot have."""
    if kind == "default":
        return
    if kind != "yarn":
        yield f"model.path: the rope_type of latent attention must be default or yarn, got {kind!r}"
    mscale = table.get("mscale")
    of_all = table.get("mscale_all_dim")
    if not mscale or mscale != of_all or table.get("attention_factor") is not None:
        yield (
            "model.path: mscale and mscale_all_dim of latent attention must be the same number "
            f"without an attention_factor, got {mscale!r} and {of_all!r}"
        )


def _dense_problems(values: Table) -> Iterator[str]:
    """Yields a line if the programs would have other layers without experts."""
    kinds = values.get("mlp_layer_types") or []
    dense = values.get("first_k_dense_replace") or 0
    if kinds and kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        yield (
            f"model.path: mlp_layer_types must be dense for the first {dense} layers and sparse "
            f"for all others, as first_k_dense_replace says, got {kinds}"
        )


def _turned_problems(values: Table) -> Iterator[str]:
    """Yields a line if vLLM, which reads `rotary_dim`, would turn another part of each head."""
    table = values.get("rope_scaling") or values.get("rope_parameters") or {}
    part = table.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    turned = values.get("rotary_dim")
    size = values.get("head_dim") or 0
    if not isinstance(turned, int) or (part is not None and part * size != turned):
        yield (
            "model.path: rotary_dim of a MiniMaxM2ForCausalLM must be the number of turned "
            f"dimensions of its {size} in a head, got {turned} and a part of {part}"
        )


def _score_problems(values: Table) -> Iterator[str]:
    """Yields a line if learner and transformers would rank expert groups differently."""
    groups, groups_of_token, of_token = (
        values.get(name) or 0 for name in ("n_group", "topk_group", "num_experts_per_tok")
    )
    if groups > 1 and groups_of_token and of_token // groups_of_token != 2:
        yield (
            "model.path: num_experts_per_tok must be 2 * topk_group, since the learner scores a "
            "group by its best num_experts_per_tok / topk_group experts and transformers by its "
            f"best 2, got {of_token} and {groups_of_token}"
        )


def _window_problems(values: Table) -> Iterator[str]:
    """Yields a line if windowed and full attention do not alternate: vLLM ignores `layer_types`."""
    kinds = values.get("layer_types") or ()
    wrong = [place for place, kind in enumerate(kinds) if kind != (SLIDING, FULL)[place % 2]]
    if wrong:
        yield (
            "model.path: layer_types of a GptOssForCausalLM must alternate from sliding_attention "
            f"on, as rollout servers take it, got {kinds[wrong[0]]!r} for layer {wrong[0]}"
        )


def _axes_problems(_: str, table: Table, values: Table) -> Iterator[str]:
    """Yields one line for each M-RoPE setting that a model of the family cannot have."""
    sections = table.get("mrope_section")
    if not sections:
        return
    architecture = values["architectures"][0]
    if table.get("mrope_interleaved") is not True:
        yield (
            f"model.path: mrope_interleaved of a {architecture} must be true in rope_parameters, "
            f"as transformers takes it, got {table.get('mrope_interleaved')!r}"
        )
    # transformers takes a quarter if config.json does not say which part is turned.
    part = table.get("partial_rotary_factor", values.get("partial_rotary_factor", 0.25))
    turned = int(values.get("head_dim", 256) * part) // 2
    if len(sections) != 3 or sum(sections) != turned:
        yield (
            f"model.path: mrope_section of a {architecture} must be three numbers that add up to "
            f"half of the turned part of a head, {turned}, got {sections}"
        )


_QWEN35 = Family(
    values={**DENSE, **_GATED},
    # The layers that predict further tokens are neither loaded nor sampled from.
    read=(*_READ_OF_DELTA_NETS, "mtp_num_hidden_layers"),
    layer_kinds=(FULL, LINEAR),
    # Text has one axis of positions, so vLLM ignores these keys.
    rope=Rope(is_partial=True, optional=_AXES),
    is_delta=True,
    engine=EngineFacts(module="delta_models", starts_cuda=True),
)
_QWEN35_EXPERTS = Experts(is_normalized=True)
_SEEING_QWEN35 = replace(
    _QWEN35,
    rope=replace(_SEEING_ROPE, is_partial=True, problems=_axes_problems),
    vision=VisionFacts(image_token=248056, ties="same"),
)

_RECORDS = (
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        values=_DEEPSEEK,
        read=_READ,
        written=("scoring_func", "topk_method"),
        problems=_score_problems,
        rope=Rope(problems=_rope_problems),
        experts=Experts(),
    ),
    Family(
        architecture="KimiK25ForConditionalGeneration",
        model_type="kimi_k25",
        values={
            **_DEEPSEEK,
            # transformers ties embeddings if the outer table of config.json does not say so.
            "tie_word_embeddings": (False,),
            "num_nextn_predict_layers": ZERO,
        },
        read=tuple(name for name in _READ if name != "num_nextn_predict_layers"),
        written=("scoring_func", "topk_method"),
        problems=_score_problems,
        rope=Rope(problems=_rope_problems),
        experts=Experts(is_found_by_peft=False),
        decoder_folder="language_model.",
        engine=EngineFacts(module="text_models"),
    ),
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        values={**_SIGMOID, "attention_bias": ANY_BIAS, "use_qk_norm": ANY_BIAS},
        read=(*_READ_OF_EXPERTS, "partial_rotary_factor"),
        rope=Rope(is_partial=True),
        experts=Experts(),
    ),
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        values={
            **_SIGMOID,
            # vLLM needs the number, which transformers does not read.
            "first_k_dense_replace": (1,),
            # vLLM always has a separate output projection.
            "tie_word_embeddings": OFF,
            # transformers norms latent vectors with 1e-6, vLLM with the value in config.json.
            "rms_norm_eps": (None, 1e-6, 1e-5),
        },
        read=(*_READ, "mlp_layer_types"),
        written=("first_k_dense_replace",),
        problems=_dense_problems,
        rope=Rope(problems=_rope_problems),
        experts=Experts(is_normalized=True),
    ),
    Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        values={
            **UNSHARED,
            # The weights of a token's experts always add up to 1, and experts have biases.
            "norm_topk_prob": (None, True),
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "qk_norm_type": (None, "per_layer"),
            # vLLM always has a separate output projection.
            "tie_word_embeddings": OFF,
            "use_qk_norm": (None, True),
        },
        read=(
            "rotary_dim",
            "partial_rotary_factor",
            # The layers that predict further tokens are neither loaded nor sampled from.
            "num_mtp_modules",
            "use_mtp",
            "mtp_transformer_layers",
        ),
        written=("scoring_func", "use_routing_bias"),
        problems=_turned_problems,
        rope=Rope(is_partial=True),
        experts=Experts(is_normalized=True),
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        values={
            **DENSE,
            "hidden_act": _GELU,
            "hidden_activation": _GELU,
            "tie_word_embeddings": (None, True),
        },
        layer_kinds=(FULL, SLIDING),
        is_tied=True,
        rope=Rope(kinds=("default", "linear"), is_by_layer=True),
        has_windows=True,
        cannot={"model.dtype": "vLLM (0.32.0) does not compute it in float16"},
    ),
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        # vLLM does not read these fields, and uses these values.
        values={
            "attention_bias": (None, True),
            "rms_norm_eps": (None, 1e-5),
            "swiglu_alpha": (None, 1.702),
            "swiglu_limit": (None, 7.0),
            "tie_word_embeddings": OFF,
            "norm_topk_prob": (None, True),
        },
        layer_kinds=(FULL, SLIDING),
        problems=_window_problems,
        # vLLM computes no other kind, has no values of its own for what is needed, and reads no
        # other option.
        rope=Rope(
            kinds=("yarn",), needed=("beta_fast", "beta_slow"), options={"yarn": ("truncate",)}
        ),
        conversion="write them anew in bfloat16 as docs/guides/models.md shows",
        has_windows=True,
        experts=Experts(is_fused=True, is_normalized=True),
        engine=EngineFacts(is_harmony=True, copies_parameters=True),
        cannot={
            "learner.parallel.etp": "Megatron does not split experts with biases",
            "model.dtype": "vLLM (0.32.0) computes its sinks on GPUs in bfloat16 only",
        },
    ),
    Family(architecture="LlamaForCausalLM", model_type="llama", values=DENSE, has_engine_bits=True),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        values={**DENSE, "use_sliding_window": OFF},
        # Some layers have no positions.
        read=("no_rope_layers", "no_rope_layer_interval"),
        is_tied=True,
    ),
    Family(
        architecture="MistralForCausalLM", model_type="mistral", values=_VALUES, has_windows=True
    ),
    Family(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        values=_VALUES,
        has_windows=True,
    ),
    Family(architecture="Olmo2ForCausalLM", model_type="olmo2", values=DENSE),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        # No program reads attention_bias of a Qwen2, which has biases.
        values={**DENSE, "attention_bias": ANY_BIAS},
        has_head_dim=False,
        has_engine_bits=True,
    ),
    Family(
        architecture="MiMoForCausalLM",
        model_type="mimo",
        values={**DENSE, "attention_bias": ANY_BIAS},
        # The layers that predict further tokens are neither loaded nor sampled from.
        read=("num_nextn_predict_layers",),
        has_head_dim=False,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        values=DENSE,
        has_engine_bits=True,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        values=UNSHARED,
        experts=Experts(),
    ),
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        values={**_GATED, "num_local_experts": ZERO},
        read=_READ_OF_DELTA_NETS,
        layer_kinds=(FULL, LINEAR),
        rope=Rope(is_partial=True),
        is_delta=True,
        experts=Experts(),
        cannot={"lora.publish": "its files join the inputs of a delta net, which vLLM takes whole"},
    ),
    replace(_QWEN35, architecture="Qwen3_5ForCausalLM", model_type="qwen3_5_text"),
    replace(
        _QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        values=_GATED_MIXTURE,
        experts=_QWEN35_EXPERTS,
    ),
    Family(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        values={**DENSE, "attention_bias": ANY_BIAS},
        has_head_dim=False,
        rope=_SEEING_ROPE,
        vision=VisionFacts(image_token=_IMAGE_TOKEN, ties="either"),
        engine=EngineFacts(module="vision_models"),
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        values=DENSE,
        rope=_SEEING_ROPE,
        vision=VisionFacts(image_token=_IMAGE_TOKEN, deep_layers=_DEEP_LAYERS),
        engine=EngineFacts(module="vision_models"),
    ),
    Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
        # transformers always normalizes the weights of a token's experts, vLLM if the file says so.
        values={**UNSHARED, "norm_topk_prob": (True,)},
        written=("norm_topk_prob",),
        rope=_SEEING_ROPE,
        experts=Experts(is_fused=True),
        vision=VisionFacts(image_token=_IMAGE_TOKEN, deep_layers=_DEEP_LAYERS),
        engine=EngineFacts(module="vision_models"),
    ),
    replace(_SEEING_QWEN35, architecture="Qwen3_5ForConditionalGeneration", model_type="qwen3_5"),
    replace(
        _SEEING_QWEN35,
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        values=_GATED_MIXTURE,
        experts=replace(_QWEN35_EXPERTS, is_fused=True),
    ),
)

# Class that config.json names -> its record.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {record.architecture: record for record in _RECORDS}
)
_BY_MODEL_TYPE = {record.model_type: record for record in FAMILIES.values() if record.model_type}
_UNKNOWN = Family()


def architecture_of(values: Mapping[str, Any]) -> str:
    """Returns the model's class by the table of a config.json, or "" if it has none."""
    return str((values.get("architectures") or [""])[0])


def family_of(values: Mapping[str, Any]) -> Family:
    """Returns the family by `architectures`, else by `model_type`; a plain decoder if unknown."""
    architecture = architecture_of(values)
    if architecture:
        return FAMILIES.get(architecture, _UNKNOWN)
    return _BY_MODEL_TYPE.get(str(values.get("model_type")), _UNKNOWN)
