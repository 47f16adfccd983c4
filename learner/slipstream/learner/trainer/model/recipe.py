"""The settings of Megatron's objects: the trainer's values, which a run's settings override.

A run's settings are passed on by name, and are checked against Megatron's real fields.
"""

import contextlib
import dataclasses
import enum
import functools
import json
import os
import typing
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError
from slipstream.core.errors import ConfigError, did_you_mean, near_names
from slipstream.core.extension import active
from slipstream.core.models.model_sizes import normalizes_experts
from slipstream.core.settings.config import Config
from slipstream.core.settings.parallel_rules import RankLayout
from slipstream.core.settings.sections import LearnerSection
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import rotary
from slipstream.learner.trainer.layers.routers import count_tokens_once, counts_tokens
from slipstream.learner.trainer.ranks import compat

# Divisor of a rank's share of the vocabulary, where the vocabulary is padded.
VOCAB_MULTIPLE = 8
_DEFAULTS_FOR_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion")
_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "cross_entropy_loss_fusion",
    *_DEFAULTS_FOR_EXPERTS,
)
# Scales of the loss in float16. Gradients are sums over the tokens of a micro batch until they are
# float32, so that the right scale may be below 1. An overflowing pass is repeated with the same
# batch: with Megatron's default hysteresis it would keep the scale and overflow again.
_LOSS_SCALES = {"initial_loss_scale": 2.0**16, "min_loss_scale": 2.0**-16, "hysteresis": 1}
# Muon's update is as large as Adam's, so that both have one learning rate: arXiv:2502.16982, 2.2.
_MUON = {"muon_tp_mode": "duplicated", "muon_extra_scale_factor": 0.2}
# Megatron takes any value, and fails at the first step.
_MUON_VALUES = {
    "muon_tp_mode": ("duplicated", "distributed", "blockwise"),
    "muon_scale_mode": ("spectral", "shape_scaling", "unit_rms_norm"),
    "muon_fp32_matmul_prec": ("highest", "high", "medium"),
    "muon_scalar_optimizer": ("adam",),
}
# How names of settings begin that act with the optimizer on the host alone.
_OF_OFFLOAD = ("optimizer_offload_", "use_torch_optimizer_", "overlap_cpu_", "pin_cpu_")
# Ways of exchanging keys and values between context parallel ranks; None stands for p2p.
_KINDS_FOR_PACKED = (None, "p2p", "a2a")
# Without TransformerEngine these settings fail late, or change nothing.
_OF_TRANSFORMER_ENGINE = ("moe_router_fusion", "use_te_activation_func", "fp4")


def provider_of(
    bridge: Megatron, hf_config: Megatron, config: Config, *, load_weights: bool
) -> Megatron:
    """Returns Bridge's model provider; raises ConfigError if Megatron rejects a setting."""
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    values = _layout_values(hf_config, config)
    values |= rotary.rotary_settings(provider, hf_config)
    values |= _window_settings(hf_config)
    _register_hooks(provider, hf_config, config)
    if provider.num_moe_experts:
        values |= _expert_values(hf_config, config)
    values |= _fusion_values(provider, hf_config, config)
    layer_parts = [extension.layers for extension in active(config) if extension.layers]
    if layer_parts:
        from slipstream.learner.trainer.layers import spec

        values |= {"layer_parts": layer_parts, "transformer_layer_spec": spec.layer_spec}
    if config.learner.fp8 != "off":
        values |= {"fp8": "e4m3", "fp8_recipe": config.learner.fp8}
    values |= passed_through(provider, config.learner.transformer, section="learner.transformer")
    if compat.has_transformer_engine():
        # Megatron's own layers, such as the output layer, would need Apex's extension for it:
        # `fuse_gradients` sets it where it can be.
        values["gradient_accumulation_fusion"] = False
        has_windows = values.get("window_size") is not None
        _check_context_parallel(config, values.get("cp_comm_type"), has_windows=has_windows)
    check_fp8(values, config.learner)
    if values.get("deterministic_mode"):
        # The variable is read when the process runs its first kernel.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True)
    for name, value in values.items():
        setattr(provider, name, value)
    with refusals_of("learner.transformer"):
        provider.finalize()
    if provider.num_moe_experts and counts_tokens(provider):
        provider.register_pre_wrap_hook(count_tokens_once)
    return provider


def _layout_values(hf_config: Megatron, config: Config) -> dict[str, object]:
    """Returns the values that every model takes: its layout on the ranks, its types, its loss."""
    parallel = config.learner.parallel
    dtype = getattr(torch, config.model.dtype)
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp or parallel.tp,
        "sequence_parallel": config.learner.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "autocast_dtype": None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,
        # Packed micro batches differ in length; the default dispatcher refuses that, even for dense
        # models.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Bridge switches initialisation off; a tensor that no file has would then hold whatever
        # lay in memory.
        "perform_initialization": True,
        # Megatron would wait for each asynchronous send before it frees what was sent.
        "deallocate_pipeline_outputs": False,
        "overlap_p2p_comm": parallel.vpp is not None,
        "batch_p2p_comm": parallel.vpp is None,
        # The vocabulary is padded only if the ranks do not divide it, to a size that suits matrix
        # units.
        "should_pad_vocab": hf_config.vocab_size % parallel.tp != 0,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
    }


def _register_hooks(provider: Megatron, hf_config: Megatron, config: Config) -> None:
    """Registers our changes of a model, which are made before data parallelism wraps it."""
    from slipstream.learner.trainer.layers import heads
    from slipstream.learner.trainer.model.embedding import add_rows_alone

    frequencies = functools.partial(rotary.set_frequencies, hf_config=hf_config)
    provider.register_pre_wrap_hook(frequencies)
    provider.register_pre_wrap_hook(heads.fuse_heads)
    provider.register_pre_wrap_hook(add_rows_alone)
    is_latent = provider.multi_latent_attention and not compat.has_transformer_engine()
    if is_latent and config.learner.parallel.tp > 1:
        from slipstream.learner.trainer.layers.attention import make_whole_vectors

        provider.register_pre_wrap_hook(make_whole_vectors)
    if provider.num_moe_experts:
        from slipstream.learner.trainer.layers import experts

        provider.register_pre_wrap_hook(experts.mark_experts)


def _expert_values(hf_config: Megatron, config: Config) -> dict[str, object]:
    """Returns the values of a mixture of experts."""
    values: dict[str, object] = {
        # The choice of experts must not depend on the rounding of bfloat16.
        "moe_router_dtype": "fp32",
        # A policy's loss is only the objective; `learner.transformer` may set a coefficient.
        "moe_aux_loss_coeff": 0.0,
        # Bridge always lets the probabilities of the chosen experts add up to 1.
        "moe_router_pre_softmax": not normalizes_experts(hf_config.to_dict()),
    }
    if config.lora.has_mlp:
        from slipstream.learner.trainer.layers import spec

        values |= {"has_adapted_experts": True, "transformer_layer_spec": spec.layer_spec}
    return values


def _fusion_values(provider: Megatron, hf_config: Megatron, config: Config) -> dict[str, object]:
    """Returns which kernels are fused; raises ConfigError where the engine's bits cannot be met."""
    is_equal = config.algorithm.agreement == "bits"
    if is_equal and torch.cuda.is_available() and config.model.dtype == "float32":
        raise ConfigError(
            "algorithm.agreement = 'bits' on a GPU needs model.dtype = 'bfloat16' or 'float16', "
            "got 'float32'"
        )
    if not compat.has_transformer_engine() or is_equal:
        return {
            **_without_transformer_engine(config),
            "agreement": config.algorithm.agreement,
            "bias_activation_fusion": is_equal,
        }
    # Megatron's fused rotary embedding supports only YaRN in latent attention, and only positions
    # of text: positions of images have three axes.
    has_text_positions = "mrope_section" not in hf_config.rope_parameters
    return {
        # Bridge leaves some of these fusions off for Qwen. Without the fused rotary embedding,
        # packed sequences make the host wait twice in each layer. To call what torch compiles for
        # a sum with the residual takes the host longer than to start the sum alone.
        "bias_dropout_fusion": False,
        "apply_rope_fusion": has_text_positions and not provider.multi_latent_attention,
        # Megatron fuses no other activation of a gated MLP.
        "bias_activation_fusion": provider.activation_func is torch.nn.functional.silu,
        **dict.fromkeys(_DEFAULTS_FOR_EXPERTS, bool(provider.num_moe_experts)),
    }


def fuse_gradients(chunks: Sequence[Megatron], config: Config) -> None:
    """Makes TransformerEngine's layers add weights' gradients, unrounded, within the product."""
    if config.learner.transformer.get("gradient_accumulation_fusion", True):
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def check_biases(provider: Megatron, config: Config) -> None:
    """Raises ConfigError if biases of the policy's routers are to move, and cannot."""
    name = "moe_router_bias_update_rate"
    rate = config.learner.transformer.get(name)
    cause = ""
    if not provider.moe_router_enable_expert_bias:
        cause = "the routers of model.path have no biases"
    elif config.lora.rank:
        cause = f"with lora.rank {config.lora.rank} rollout servers keep the biases of model.path"
    if rate and cause:
        raise ConfigError(f"learner.transformer.{name} must be 0, got {rate}: {cause}")


def check_fp8(values: Mapping[str, object], learner: LearnerSection) -> None:
    """Raises ConfigError if fp8 in `values` lacks TransformerEngine, or is to be offloaded."""
    if not values.get("fp8"):
        return
    if not compat.has_transformer_engine():
        setting = f"learner.transformer.fp8 {values['fp8']!r}"
        if learner.fp8 != "off":
            setting = f"learner.fp8 {learner.fp8!r}"
        raise ConfigError(f"{setting} needs TransformerEngine, which is not installed")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError("a learner in FP8 needs a GPU of compute capability 8.9 or above")
    if values.get("fp8_param") and learner.offload.parameters:
        raise ConfigError(
            "learner.offload.parameters cannot move 8-bit parameters: learner.transformer.fp8_param"
        )


def _check_context_parallel(config: Config, kind: object, *, has_windows: bool) -> None:
    """Raises ConfigError where TransformerEngine 2.11 fails at the first packed micro batch."""
    cp = config.learner.parallel.cp
    if cp == 1:
        return
    if config.model.dtype == "float32":
        raise ConfigError(
            "model.dtype must be bfloat16 or float16 for TransformerEngine to share sequences over "
            f"the ranks of learner.parallel.cp {cp}, got float32"
        )
    kinds = kind if isinstance(kind, list) else [kind]
    unknown = [name for name in kinds if name not in _KINDS_FOR_PACKED]
    if unknown:
        raise ConfigError(
            f"learner.transformer.cp_comm_type must be p2p or a2a, as sequences are packed, "
            f"got {unknown[0]!r}"
        )
    if has_windows and set(kinds) != {"a2a"}:
        raise ConfigError(
            "learner.transformer.cp_comm_type must be a2a for a model with attention windows and "
            f"learner.parallel.cp {cp}, got {kind!r}"
        )


def _without_transformer_engine(config: Config) -> dict[str, object]:
    from slipstream.learner.trainer.layers import spec

    for key in (*_FUSIONS, *_OF_TRANSFORMER_ENGINE):
        if config.learner.transformer.get(key):
            raise ConfigError(
                f"learner.transformer.{key} needs TransformerEngine, which is not installed here"
            )
    values: dict[str, object] = dict.fromkeys(_FUSIONS, False)
    values["use_cpu_initialization"] = not torch.cuda.is_available()
    values["transformer_layer_spec"] = spec.layer_spec
    return values


def _window_settings(hf_config: Megatron) -> dict[str, object]:
    """Returns Megatron's settings of windows, which leave out the query's own token; {} if none."""
    size = getattr(hf_config, "sliding_window", None)
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention"]
    if size is None or "sliding_attention" not in kinds:
        return {}
    is_local = [kind == "sliding_attention" for kind in kinds]
    return {
        "window_size": (size - 1, 0),
        "window_attn_skip_freq": None if all(is_local) else is_local,
    }


def ddp_config_of(config: Config) -> Megatron:
    """Returns Megatron's settings of data parallelism; raises ConfigError if one is rejected."""
    from megatron.core.distributed import DistributedDataParallelConfig

    values: dict[str, object] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.learner.use_distributed_optimizer,
        "average_in_collective": False,
    }
    learner = config.learner
    if torch.cuda.is_available():
        # Communication overlaps computation where there are replicas. A part that is offloaded to
        # the host cannot receive.
        layout = RankLayout.of(learner.parallel, learner.world_size)
        away = learner.offload.parameters or learner.offload.gradients
        overlaps = layout.dp * layout.cp > 1 and not away
        values["overlap_grad_reduce"] = overlaps
        values["overlap_param_gather"] = overlaps and learner.use_distributed_optimizer
    values |= passed_through(DistributedDataParallelConfig, learner.ddp, section="learner.ddp")
    if "overlap_param_gather" not in learner.ddp and not values.get("overlap_grad_reduce"):
        values["overlap_param_gather"] = False
    if learner.optimizer.get("optimizer") == "muon":
        # Gradients are summed whole, and whole matrices are gathered.
        values |= {"use_distributed_optimizer": False, "overlap_param_gather": False}
    with refusals_of("learner.ddp"):
        return DistributedDataParallelConfig(**values)


def optimizer_config_of(config: Config) -> Megatron:
    """Returns Megatron's settings of the optimizer; raises ConfigError if Megatron rejects one."""
    from megatron.core.optimizer import OptimizerConfig

    learner = config.learner
    dtype = getattr(torch, config.model.dtype)
    values: dict[str, object] = {
        "optimizer": "adam",
        "lr": config.algorithm.learning_rate,
        "weight_decay": learner.weight_decay,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-8,
        "clip_grad": learner.grad_clip,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        **_LOSS_SCALES,
        "params_dtype": dtype,
        "use_distributed_optimizer": learner.use_distributed_optimizer,
        "overlap_param_gather": ddp_config_of(config).overlap_param_gather,
        # The optimizer on the host gets its gradients only if this is set; otherwise it never
        # updates the weights.
        "use_precision_aware_optimizer": bool(learner.optimizer.get("optimizer_cpu_offload")),
    }
    if learner.optimizer.get("optimizer") == "muon":
        splits = learner.use_distributed_optimizer
        values |= _MUON
        values |= {
            "use_distributed_optimizer": False,
            "use_layer_wise_distributed_optimizer": splits,
        }
        values["muon_fp32_matmul_prec"] = "medium" if torch.cuda.is_available() else "highest"
    values |= passed_through(OptimizerConfig, learner.optimizer, section="learner.optimizer")
    check_optimizer(config, values)
    with refusals_of("learner.optimizer"):
        return OptimizerConfig(**values)


def check_optimizer(config: Config, values: Mapping[str, object]) -> None:
    """Raises ConfigError for an optimizer that cannot work here; `values` are all its settings."""
    kind = values["optimizer"]
    if kind not in ("adam", "sgd", "muon"):
        raise ConfigError(
            f"learner.optimizer.optimizer must be adam, sgd or muon, got {kind!r}: nobody has "
            "tried others of the package emerging-optimizers"
        )
    other_prefixes = {
        "muon": ("sgd_",),
        "adam": ("muon_", "sgd_"),
        "sgd": ("muon_", "adam_", "decoupled_w"),
    }
    idle = {
        f"the optimizer is {kind}": (
            "adaptive_muon_",
            "soap_",
            "lion_",
            *other_prefixes[str(kind)],
        ),
        "the learning rate falls as algorithm.decay says": ("min_lr", "decoupled_min_lr"),
    }
    if config.model.dtype != "float16":
        scales = ("loss_scale", "initial_loss_scale", "min_loss_scale", "hysteresis")
        idle[f"the loss has no scale in {config.model.dtype}"] = scales
    if not values.get("optimizer_cpu_offload"):
        idle["optimizer_cpu_offload is off"] = _OF_OFFLOAD
    for name in config.learner.optimizer:
        for cause, beginnings in idle.items():
            if name.startswith(beginnings):
                raise ConfigError(f"learner.optimizer.{name} has no effect: {cause}")
    if values.get("optimizer_cpu_offload"):
        if not torch.cuda.is_available():
            raise ConfigError("learner.optimizer.optimizer_cpu_offload needs a GPU, there is none")
        # Megatron would give torch slices of float32 parameters as parameters: torch refuses that.
        if config.model.dtype != "bfloat16":
            raise ConfigError(
                "learner.optimizer.optimizer_cpu_offload needs model.dtype bfloat16, "
                f"got {config.model.dtype}"
            )
    if kind != "muon":
        return
    compat.check_installed(compat.MUON_VERSIONS)
    from megatron.core.optimizer.emerging_optimizers import get_supported_coefficient_types

    types = tuple(name for name in get_supported_coefficient_types() if name != "custom")
    for name, allowed in (_MUON_VALUES | {"muon_coefficient_type": types}).items():
        if values.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"learner.optimizer.{name} must be {' or '.join(allowed)}, got {values[name]!r}"
            )
    passed: Megatron = values
    if (steps := passed.get("muon_num_ns_steps", 1)) < 1:
        raise ConfigError(f"learner.optimizer.muon_num_ns_steps must be 1 or more, got {steps}")
    if not 0 <= (share := passed.get("muon_momentum", 0)) < 1:
        raise ConfigError(f"learner.optimizer.muon_momentum must be 0 to below 1, got {share}")
    splits_float32 = config.learner.use_distributed_optimizer and config.model.dtype == "float32"
    for name, is_set, cause in (
        (
            "learner.ddp.use_distributed_optimizer",
            splits_float32,
            "that needs model.dtype bfloat16",
        ),
        ("model.dtype float16", config.model.dtype == "float16", "it does not scale the loss"),
        ("lora.rank", config.lora.rank, "nobody has tried it on the factors of adapters"),
        ("sampling.max_images", config.sampling.max_images, "a tower's embeddings are no matrices"),
        (
            "learner.transformer.fp8_param",
            config.learner.transformer.get("fp8_param"),
            "nobody has tried it on 8-bit parameters",
        ),
    ):
        if is_set:
            raise ConfigError(f"learner.optimizer.optimizer muon does not go with {name}: {cause}")


# Megatron's fields that must agree with groups, weights or the trainer's code. The value is the
# setting to change instead, None if there is none.
OWNED: Mapping[str, str | None] = {
    "tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "virtual_pipeline_model_parallel_size": "learner.parallel.vpp",
    "context_parallel_size": "learner.parallel.cp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "expert_tensor_parallel_size": "learner.parallel.etp",
    "use_distributed_optimizer": "learner.ddp.use_distributed_optimizer",
    "lr": "algorithm.learning_rate",
    "weight_decay": "learner.weight_decay",
    "clip_grad": "learner.grad_clip",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "model.dtype"),
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "kv_channels",
            "vocab_size",
            "num_attention_heads",
            "num_query_groups",
            "rotary_base",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "share_embeddings_and_output_weights",
        ),
        "model.path",
    ),
    **dict.fromkeys(
        (
            "calculate_per_token_loss",
            "average_in_collective",
            "variable_seq_lengths",
            "perform_initialization",
            "transformer_layer_spec",
            "cache_mla_latents",
            "timers",
            "init_method",
            "embedding_init_method",
            "output_layer_init_method",
            "finalize_model_grads_func",
            "grad_scale_func",
            "grad_sync_func",
            "param_sync_func",
            "no_sync_func",
            "moe_grad_scale_func",
            "mtp_grad_scale_func",
            "experimental_attention_variant_loss_scale_func",
            "gtp_weight_remat_size",
            "expert_gtp_weight_remat_size",
            "mlp_chunks_for_training",
            "_cpu_offloading_context",
            "_pg_collection",
            # `logprobs` replaces Megatron's projection to the vocabulary.
            "defer_embedding_wgrad_compute",
            # With asynchronous sends an output would be freed before it is sent.
            "deallocate_pipeline_outputs",
        )
    ),
}


def passed_through(
    target: Megatron, settings: Mapping[str, JsonValue], *, section: str
) -> dict[str, object]:
    """Returns the values of `settings` for the dataclass (or instance) `target`.

    Raises ConfigError for an unknown key (with the most similar names), for a key that the trainer
    sets itself, and for a value of another type than the field's. Names of torch's element types
    and of members of enums are converted to these objects.
    """
    hints = typing.get_type_hints(target if isinstance(target, type) else type(target))
    fields = [field.name for field in dataclasses.fields(target) if field.init]
    owned = {key for key, ours in OWNED.items() if ours != f"{section}.{key}"}
    values: dict[str, object] = {}

    def refused(key: str) -> str:
        rule = f"set {OWNED[key]} instead" if OWNED[key] else "the trainer depends on its value"
        return f"cannot be passed through: {rule}"

    for key, value in settings.items():
        if key not in fields:
            hint = ""
            near = near_names(key, fields)
            if near and near[0] in owned:
                hint = f"; {near[0]!r} {refused(near[0])}"
            elif others_near := [name for name in near if name not in owned]:
                hint = f"; {did_you_mean(others_near)}"
            raise ConfigError(f"unknown key {section}.{key}{hint}")
        if key in owned:
            raise ConfigError(f"{section}.{key} {refused(key)}")
        values[key] = _typed(value, hints[key], f"{section}.{key}")
    return values


def _typed(value: JsonValue, hint: Megatron, where: str) -> object:
    """Returns `value` as the type `hint`; raises ConfigError with `where` for another type."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in hint.__members__:
            raise ConfigError(
                f"{where} must be one of {', '.join(hint.__members__)}, got {value!r}"
            )
        return hint[str(value)]
    # The field's name does not tell its type: moe_router_dtype, for example, is a string.
    if "torch.dtype" in str(hint):
        dtype = vars(torch).get(value) if isinstance(value, str) else None
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{where}: {value!r} is no element type of torch")
        return dtype
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
    """Turns Megatron's errors inside the context into a ConfigError of one line about `section`."""
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{section}: Megatron refuses it: {message}") from error
