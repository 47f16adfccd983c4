"""Rules for the learner's ranks and for the tables that Megatron gets, for any model.

Each function yields one line for each broken rule, with the value and the rule. These rules refuse
sizes early that Megatron would refuse only when groups, layers or optimizers are made. The ranks of
each parallel group are computed in Megatron's order.

`learner.transformer` must not change the model: servers sample from the model of config.json. This
module does not import Megatron, so that the rules hold on every machine; a test classifies all
fields of the tested version.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from pydantic import JsonValue
from slipstream.core.settings.sections import LearnerSection, ParallelSection

Group: TypeAlias = tuple[int, ...]

# Largest number of groups that a line lists; of more groups it has the first ones and the last.
SHOWN_GROUPS = 8
# Largest number of ranks of a group that are listed.
SHOWN_RANKS = 4


@dataclass(frozen=True)
class RankLayout:
    """The sizes of all groups of `world_size` ranks.

    The ranks form two grids. Attention, embeddings and dense layers use tp, cp, dp and pp; experts
    use etp, ep, expert_dp and pp. In both grids the first axis varies fastest. The grids share only
    the pipeline stages, so that ep is independent of tp * cp.
    """

    world_size: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, parallel: ParallelSection, world_size: int) -> Self:
        """Returns all ranks' layout; raises ValueError if sizes do not divide `world_size`."""
        etp = parallel.etp or parallel.tp
        dense = parallel.tp * parallel.pp * parallel.cp
        expert = parallel.ep * etp * parallel.pp
        for text, size in (("tp * pp * cp", dense), ("ep * etp * pp", expert)):
            if world_size % size:
                raise ValueError(
                    f"learner.world_size must be a multiple of {text} = {size}, got {world_size}"
                )
        return cls(world_size, parallel.tp, parallel.cp, parallel.pp, parallel.ep, etp)

    @property
    def dp(self) -> int:
        """The number of replicas of the model without experts; each has its own micro batches."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    def groups(self) -> dict[str, tuple[Group, ...]]:
        """Returns all groups of each kind: tp, cp, dp, pp, etp, ep, expert_dp."""
        dense = (("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp))
        expert = (("etp", self.etp), ("ep", self.ep), ("expert_dp", self.expert_dp), dense[3])
        return _grid_groups(expert) | _grid_groups(dense)

    def describe(self, *, has_experts: bool) -> str:
        """Returns a line of sizes, and one for each kind of groups that has several ranks."""
        groups = self.groups()
        noun = "rank" if self.world_size == 1 else "ranks"
        sizes = f"tp {self.tp}, pp {self.pp}, cp {self.cp}, dp {self.dp}"
        names = ["tp", "cp", "dp", "pp"]
        if has_experts:
            sizes += f"; experts: ep {self.ep}, etp {self.etp}, dp {self.expert_dp}"
            names += ["ep", "etp", "expert_dp"]
        lines = [f"{self.world_size} {noun}: {sizes}"]
        for name in names:
            number = len(groups[name])
            size = len(groups[name][0])
            texts = _shortened(list(map(_ranks_text, groups[name])), SHOWN_GROUPS, "...")
            lines += [f"{name}: {number} x {size}: {texts}"] if size > 1 else []
        return "\n".join(lines)


def _grid_groups(axes: Sequence[tuple[str, int]]) -> dict[str, tuple[Group, ...]]:
    sizes = [size for _, size in axes]
    grid = np.arange(math.prod(sizes)).reshape(sizes[::-1])
    return {
        name: tuple(
            tuple(row) for row in np.moveaxis(grid, -1 - axis, -1).reshape(-1, size).tolist()
        )
        for axis, (name, size) in enumerate(axes)
    }


def _ranks_text(ranks: Group) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{_shortened(list(map(str, ranks)), SHOWN_RANKS, '..')}]"


def _shortened(texts: Sequence[str], limit: int, gap: str) -> str:
    """Returns the texts in one line; of too many the first ones, `gap` and the last one."""
    return " ".join(texts if len(texts) <= limit else [*texts[: limit - 1], gap, texts[-1]])


SECTION = "learner.transformer"
# Settings that are read from config.json, or belong to architectures that are not supported.
FROM_MODEL = frozenset(
    {
        "activation_func",
        "activation_func_clamp_value",
        "apply_residual_connection_post_layernorm",
        "attention_output_gate",
        "experimental_attention_variant",
        "gated_linear_unit",
        "glu_linear_offset",
        "heterogeneous_block_specs",
        "hf_model_revision",
        "is_hybrid_model",
        "kv_lora_rank",
        "mamba_head_dim",
        "mamba_state_dim",
        "moe_apply_probs_on_input",
        "moe_latent_size",
        "moe_layer_freq",
        "moe_mlp_glu_interleave_size",
        "moe_router_group_topk",
        "moe_router_num_groups",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk_limited_devices",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_gate",
        "moe_shared_expert_glu_interleave_size",
        "moe_shared_expert_intermediate_size",
        "mrope_section",
        "mtp_hybrid_override_pattern",
        "mtp_use_repeated_layer",
        "multi_latent_attention",
        "no_rope_freq",
        "normalization",
        "original_max_position_embeddings",
        "parallel_output",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_l2_norm",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "scatter_embedding_sequence_parallel",
        "seq_len_interpolation_factor",
        "use_arbitrary_attention_mask",
        "use_mup",
        "v_head_dim",
    }
)
_FROM_MODEL = (
    "add_",
    "beta_",
    "dsa_",
    "layernorm_",
    "linear_",
    "mamba_num_",
    "mscale",
    "mup_",
    "rope_",
    "rotary_",
    "softmax_",
    "window_",
    "yarn_",
)
# Settings that change training only: noise, forced routing, experts that drop tokens.
OFF = frozenset(
    {
        "apply_query_key_layer_scaling",
        "attention_dropout",
        "hidden_dropout",
        "moe_enable_routing_replay",
        "moe_expert_capacity_factor",
        "moe_expert_rank_capacity_factor",
        "moe_input_jitter_eps",
        "moe_pad_expert_input_to_capacity",
        "moe_router_enable_expert_bias",
        "moe_router_force_biased",
        "moe_router_force_load_balancing",
        "moe_router_quantile_balancing_ema",
        "moe_token_drop_policy",
        "moe_token_dropping",
        "mtp_enabled",
        "mtp_standalone",
        "qk_clip",
        "quant_recipe",
        "restore_modelopt_state",
    }
)
# Settings that are newer than what was tried with packed sequences.
UNTRIED = frozenset(
    {
        "dense_grouped_gemm",
        "expert_tensor_parallel_num_weight_shards",
        "flash_attention_version",
        "fp8_output_proj",
        "fused_residual_rmsnorm",
        "mamba_training_ssm_states_dtype",
        "mla_down_proj_fusion",
        "moe_ncclep_static_shape",
        "moe_ncclep_zero_copy",
        "moe_paged_stash",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "mtp_detach_heads",
        "tensor_parallel_num_weight_shards",
        "use_grouped_gemm_for_dense_mlp",
        "use_grouped_gemm_for_shared_expert",
    }
)
_BALANCING = "moe_router_load_balancing_type"


def comes_from_model(name: str) -> bool:
    """Returns whether config.json decides a setting of Megatron's model."""
    return name in FROM_MODEL or name.startswith(_FROM_MODEL)


def policy_problems(transformer: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yields one line for each setting with which trained and sampling policy would differ."""
    for name, value in transformer.items():
        if comes_from_model(name):
            yield f"{SECTION}.{name} cannot be set, got {value!r}: config.json decides it"
        elif name in OFF and value:
            yield (
                f"{SECTION}.{name} must be left out, got {value!r}: rollout servers do not "
                "compute so, and the policy that is trained must be the one that samples"
            )
        elif name in UNTRIED and value:
            yield (
                f"{SECTION}.{name} must be left out, got {value!r}: nobody has shown that packed "
                "sequences are trained rightly with it"
            )
    balancing = transformer.get(_BALANCING)
    kinds = balancing if isinstance(balancing, list) else [balancing]
    if "global_aux_loss" in kinds:
        yield (
            f"{SECTION}.{_BALANCING} must not be global_aux_loss: it needs micro batches of equal "
            "length on all replicas, name aux_loss"
        )
    for kind in ("sinkhorn", "quantile_balancing"):
        if kind in kinds:
            yield (
                f"{SECTION}.{_BALANCING} must not be {kind}: it chooses other experts than rollout "
                "servers do, and the policy that is trained must be the one that samples"
            )


# How settings of Megatron's features begin that need more: other groups, wrappers, training loops.
_NOT_OURS = {
    "ddp": (
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "nccl_ub",
        "fsdp_",
        "megatron_fsdp_",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "disable_symmetric_registration",
        "gradient_reduce_div_fusion",
        "keep_fp8_transpose_cache",
        "suggested_communication_unit_size",
        "delay_wgrad_compute",
        # A rank would end where the trainer sets a batch aside.
        "check_for_",
    ),
    "optimizer": (
        "barrier_with_L1_time",
        "config_logger_dir",
        "grad_norm_skip_threshold",
        "log_num_zeros_in_grad",
        "optimizer_cuda_graph",
        "overlap_param_gather_with_optimizer_step",
        "use_layer_wise_distributed_optimizer",
    ),
    "transformer": ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "mtp_num_layers"),
}


def world_problems(learner: LearnerSection) -> Iterator[str]:
    """Yields one line for each rule on parallel sizes that the settings break, for any model."""
    parallel = learner.parallel
    world = learner.world_size
    try:
        RankLayout.of(parallel, world)
    except ValueError as error:
        yield str(error)
    if parallel.cp > 1 and learner.micro_batch_tokens % 2:
        yield (
            f"learner.micro_batch_tokens must be even with learner.parallel.cp > 1, as each "
            f"sequence is cut into 2 * cp equal chunks, got {learner.micro_batch_tokens}"
        )
    if learner.sequence_parallel and parallel.tp == 1:
        yield "learner.transformer.sequence_parallel needs tp > 1, got tp = 1"
    if parallel.vpp is not None and parallel.pp == 1:
        yield f"learner.parallel.vpp needs pp > 1, got vpp = {parallel.vpp} and pp = 1"
    elif parallel.vpp == 1:
        yield "learner.parallel.vpp must be 2 or more, or left out, got 1"
    if learner.ranks_per_node is not None and world % learner.ranks_per_node:
        yield (
            f"learner.world_size must be a multiple of ranks_per_node, "
            f"got {world} and {learner.ranks_per_node}"
        )


def table_problems(learner: LearnerSection) -> Iterator[str]:
    """Yields one line for each fault of the tables that are passed through to Megatron."""
    tables = {
        "ddp": learner.ddp,
        "optimizer": learner.optimizer,
        "transformer": learner.transformer,
    }
    for section, beginnings in _NOT_OURS.items():
        for key, value in tables[section].items():
            if value and key.startswith(beginnings):
                yield f"learner.{section}.{key} is not supported: the trainer's loop does without"
    yield from _optimizer_problems(learner)
    # Megatron would ignore the method with any other granularity, and both without one.
    is_full = learner.transformer.get("recompute_granularity") == "full"
    for key in ("recompute_method", "recompute_num_layers"):
        if learner.transformer.get(key) and not is_full:
            yield f"learner.transformer.{key} needs recompute_granularity = 'full'"
    if learner.transformer.get("moe_token_dispatcher_type", "alltoall") not in ("alltoall", "flex"):
        yield (
            "learner.transformer.moe_token_dispatcher_type must be alltoall or flex: others refuse "
            f"sequences of different lengths, got "
            f"{learner.transformer['moe_token_dispatcher_type']!r}"
        )
    yield from policy_problems(learner.transformer)
    group = learner.transformer.get("microbatch_group_size_per_vp_stage", learner.parallel.pp)
    if group != learner.parallel.pp:
        yield (
            "learner.transformer.microbatch_group_size_per_vp_stage must be pp: "
            f"micro batches come in multiples of it, got {group} and {learner.parallel.pp}"
        )


def _optimizer_problems(learner: LearnerSection) -> Iterator[str]:
    ddp = learner.ddp
    optimizer = learner.optimizer
    kind = optimizer.get("optimizer", "adam")
    if ddp.get("overlap_param_gather") and kind == "muon":
        yield "learner.ddp.overlap_param_gather must be false with learner.optimizer.optimizer muon"
    elif ddp.get("overlap_param_gather"):
        if not learner.use_distributed_optimizer:
            yield "learner.ddp.overlap_param_gather needs ddp.use_distributed_optimizer = true"
        if not ddp.get("overlap_grad_reduce"):
            yield "learner.ddp.overlap_param_gather needs learner.ddp.overlap_grad_reduce = true"
    if optimizer.get("overlap_param_gather"):
        yield "learner.optimizer.overlap_param_gather: set learner.ddp.overlap_param_gather instead"
    if ddp.get("num_distributed_optimizer_instances", 1) != 1:
        yield (
            f"learner.ddp.num_distributed_optimizer_instances must be 1, "
            f"got {ddp['num_distributed_optimizer_instances']}"
        )
    if kind == "sgd" and learner.use_distributed_optimizer:
        yield "learner.ddp.use_distributed_optimizer must be false with optimizer.optimizer sgd"
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if optimizer.get(name) and kind != "adam":
            yield f"learner.optimizer.{name} needs learner.optimizer.optimizer adam, got {kind!r}"
        elif optimizer.get(name) and not learner.use_distributed_optimizer:
            yield f"learner.optimizer.{name} needs learner.ddp.use_distributed_optimizer = true"
    share = optimizer.get("optimizer_offload_fraction", 0.0)
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        yield f"learner.optimizer.optimizer_offload_fraction must be 0 to 1, got {share!r}"
