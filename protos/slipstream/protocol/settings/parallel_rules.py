"""Rules for parallel layouts, checked without loading anything.

Each function yields one line for each broken rule, with the value and the rule. These rules refuse
sizes early that Megatron would refuse only when groups, layers or optimizers are made.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue
from slipstream.protocol.settings.model_sizes import ModelSizes
from slipstream.protocol.settings.rank_layout import RankLayout
from slipstream.protocol.settings.rope_fields import VISION
from slipstream.protocol.settings.sections import LearnerSection, ParallelSection
from slipstream.protocol.settings.transformer_table import policy_problems

# Architectures that Megatron-Bridge loads and exports, and tests compare with transformers.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3NextForCausalLM",
    *VISION,
)
# Architectures whose windows the learner, transformers and vLLM compute alike.
WINDOWED = (
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Why a scaling of the rotary embedding is refused.
_ROPE_REFUSALS = {
    "dynamic": "transformers scales by the length of each sequence, vLLM by the longest possible",
    "longrope": "transformers chooses factors for each sequence, vLLM by the longest possible",
}
# Megatron's features that need more than settings: other groups, wrappers or training loops.
_NOT_OURS = {
    "ddp": ("use_megatron_fsdp", "use_custom_fsdp", "nccl_ub"),
    "optimizer": ("overlap_param_gather_with_optimizer_step",),
    "transformer": ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "mtp_num_layers"),
}


def world_problems(learner: LearnerSection) -> Iterator[str]:
    """Checks the sizes alone, for any model."""
    parallel, world = learner.parallel, learner.world_size
    try:
        RankLayout.of(parallel, world)
    except ValueError as error:
        yield str(error)
    if parallel.cp > 1 and learner.micro_batch_tokens % 2:
        yield (
            f"learner.micro_batch_tokens must be even with learner.parallel.cp > 1, as each "
            f"sequence is cut into 2 * cp equal chunks, got {learner.micro_batch_tokens}"
        )
    if parallel.sequence_parallel and parallel.tp == 1:
        yield "learner.parallel.sequence_parallel needs tp > 1, got tp = 1"
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
    """Checks the tables that are passed through to Megatron for contradictions."""
    tables = {
        "ddp": learner.ddp,
        "optimizer": learner.optimizer,
        "transformer": learner.transformer,
    }
    for section, keys in _NOT_OURS.items():
        for key in keys:
            if tables[section].get(key):
                yield f"learner.{section}.{key} is not supported: the trainer's loop lacks it"
    yield from _optimizer_problems(learner)
    yield from _recompute_problems(learner)
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
    ddp, optimizer = learner.ddp, learner.optimizer
    if ddp.get("overlap_param_gather"):
        if not learner.use_distributed_optimizer:
            yield "learner.ddp.overlap_param_gather needs learner.use_distributed_optimizer = true"
        if not ddp.get("overlap_grad_reduce"):
            yield "learner.ddp.overlap_param_gather needs learner.ddp.overlap_grad_reduce = true"
    if optimizer.get("overlap_param_gather"):
        yield "learner.optimizer.overlap_param_gather: set learner.ddp.overlap_param_gather instead"
    if ddp.get("num_distributed_optimizer_instances", 1) != 1:
        yield (
            f"learner.ddp.num_distributed_optimizer_instances must be 1, "
            f"got {ddp['num_distributed_optimizer_instances']}"
        )
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if optimizer.get(name) and not learner.use_distributed_optimizer:
            yield f"learner.optimizer.{name} needs learner.use_distributed_optimizer = true"
    share = optimizer.get("optimizer_offload_fraction", 0.0)
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        yield f"learner.optimizer.optimizer_offload_fraction must be 0 to 1, got {share!r}"


def _recompute_problems(learner: LearnerSection) -> Iterator[str]:
    transformer, parallel = learner.transformer, learner.parallel
    granularity = transformer.get("recompute_granularity")
    if learner.recompute == "auto" and (granularity or transformer.get("cpu_offloading")):
        key = "recompute_granularity" if granularity else "cpu_offloading"
        yield f"learner.recompute = 'auto' plans for itself: learner.transformer.{key} excludes it"
    others = [key for key in ("recompute_method", "recompute_num_layers") if transformer.get(key)]
    if granularity not in (None, "full", "selective"):
        yield (
            "learner.transformer.recompute_granularity must be full or selective, "
            f"got {granularity!r}"
        )
    if granularity == "full" and len(others) < 2:
        yield (
            "learner.transformer.recompute_granularity = 'full' needs recompute_method "
            "and recompute_num_layers"
        )
    if granularity != "full" and others:
        yield f"learner.transformer.{others[0]} needs recompute_granularity = 'full'"
    if transformer.get("cpu_offloading"):
        if parallel.pp > 1:
            yield f"learner.transformer.cpu_offloading needs pp = 1, got pp = {parallel.pp}"
        if granularity is not None:
            yield "learner.transformer.cpu_offloading excludes recompute_granularity"


def replay_problems(transformer: dict[str, JsonValue]) -> Iterator[str]:
    """Checks the table `learner.transformer` for the replay of the rollout's experts."""
    if transformer.get("moe_router_fusion"):
        yield (
            "learner.transformer.moe_router_fusion must be false with algorithm.router_replay: "
            "the fused kernel chooses the experts itself"
        )
    for key in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"):
        if transformer.get(key) not in (None, False, "none"):
            yield (
                f"learner.transformer.{key} cannot be set with algorithm.router_replay: "
                "a graph would replay the experts that it was recorded with"
            )


def model_problems(sizes: ModelSizes) -> Iterator[str]:
    """Checks a model, for any layout."""
    if sizes.architecture not in ARCHITECTURES:
        kind = "mixture of experts" if sizes.experts else "model"
        yield (
            f"model.path holds a {kind} of architecture {sizes.architecture or 'without a name'}, "
            f"which cannot be loaded; known are {', '.join(ARCHITECTURES)}"
        )
        return
    if sizes.is_quantized:
        yield f"model.path holds quantized weights, which cannot be trained{_conversion(sizes)}"
    if sizes.uses_sliding_window and sizes.architecture not in WINDOWED:
        yield (
            f"model.path holds a {sizes.architecture} with a sliding window, which was tested for "
            f"{', '.join(WINDOWED)} only"
        )
    if sizes.rope_type not in ROPE_TYPES:
        cause = _ROPE_REFUSALS.get(sizes.rope_type, "was not tested")
        yield (
            f"model.path: the rope_type must be one of {', '.join(ROPE_TYPES)}, "
            f"got {sizes.rope_type!r}: {cause}"
        )
    if not sizes.experts:
        return
    if sizes.architecture == "Qwen2MoeForCausalLM" and not sizes.shared_expert_ffn:
        yield "model.path: shared_expert_intermediate_size of a Qwen2MoeForCausalLM must be set"
    if sizes.has_dense_layers:
        yield "model.path holds a mixture of experts with dense layers in between: not supported"
    if not 1 <= sizes.experts_per_token <= sizes.experts:
        yield (
            f"model.path: num_experts_per_tok must be 1 to the {sizes.experts} experts, "
            f"got {sizes.experts_per_token}"
        )
    is_v3 = sizes.architecture == "DeepseekV3ForCausalLM"
    if is_v3 and sizes.expert_groups > 1 and sizes.experts_per_token // sizes.chosen_groups != 2:
        yield (
            "model.path: num_experts_per_tok must be 2 * topk_group, since the learner scores a "
            "group by its best num_experts_per_tok / topk_group experts and transformers by its "
            f"best 2, got {sizes.experts_per_token} and {sizes.chosen_groups}"
        )
    if sizes.experts_per_token == 1 and sizes.normalizes_experts:
        yield ("model.path: norm_topk_prob with one expert per token leaves the router no gradient")


def _conversion(sizes: ModelSizes) -> str:
    if sizes.architecture != "GptOssForCausalLM":
        return ""
    return ": write them anew with python -m slipstream.learner.trainer.dequantize SOURCE TARGET"


def layout_problems(
    sizes: ModelSizes, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    """Checks a model in a layout."""
    tp = parallel.tp
    for number, noun in (
        (sizes.heads, "attention heads"),
        (sizes.kv_heads, "key-value heads"),
    ):
        if number % tp:
            yield f"learner.parallel.tp must divide the model's {number} {noun}, got {tp}"
    if sizes.dense_layers and sizes.ffn % tp:
        yield f"learner.parallel.tp must divide the intermediate size of {sizes.ffn}, got {tp}"
    if sizes.linear_heads:
        yield from _delta_net_problems(sizes, parallel)
    yield from _stage_problems(sizes.layers, parallel, transformer)
    yield from _expert_problems(sizes, parallel, transformer)
    if sizes.latent_size and (sizes.latent_size % tp or sizes.query_latent_size % tp):
        yield (
            "learner.parallel.tp must divide q_lora_rank and kv_lora_rank + qk_rope_head_dim, "
            f"{sizes.query_latent_size} and {sizes.latent_size}, got {tp}"
        )


def _delta_net_problems(sizes: ModelSizes, parallel: ParallelSection) -> Iterator[str]:
    if parallel.cp > 1:
        yield (
            f"learner.parallel.cp must be 1 for a {sizes.architecture}: a delta net reads the "
            f"tokens of a sequence in turn, got {parallel.cp}"
        )
    for number in sizes.linear_heads:
        if number % parallel.tp:
            yield (
                f"learner.parallel.tp must divide the delta nets' {number} heads, got {parallel.tp}"
            )


def _expert_problems(
    sizes: ModelSizes, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    ep, etp = parallel.ep, parallel.etp or parallel.tp
    if not sizes.experts:
        if ep > 1:
            yield f"learner.parallel.ep must be 1: the model has no experts, got {ep}"
        if etp != parallel.tp:
            yield (
                f"learner.parallel.etp must be left out: the model has no experts, "
                f"got {etp} with tp {parallel.tp}"
            )
        return
    if sizes.shared_expert_ffn % parallel.tp:
        yield (
            f"learner.parallel.tp must divide the shared expert's intermediate size of "
            f"{sizes.shared_expert_ffn}, got {parallel.tp}"
        )
    if sizes.experts % ep:
        yield f"learner.parallel.ep must divide the model's {sizes.experts} experts, got {ep}"
    if sizes.architecture == "DeepseekV2ForCausalLM" and transformer.get("moe_router_fusion"):
        yield (
            "learner.transformer.moe_router_fusion must be false for a DeepseekV2ForCausalLM: "
            "the fused kernel scores groups of experts otherwise"
        )
    if sizes.architecture == "GptOssForCausalLM" and etp > 1:
        yield (
            "learner.parallel.etp (None: tp) must be 1: Megatron does not split experts with "
            f"biases, got {etp}"
        )
    if sizes.expert_ffn % etp:
        yield (
            f"learner.parallel.etp (None: tp) must divide the experts' intermediate size of "
            f"{sizes.expert_ffn}, got {etp}"
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            "learner.parallel.sequence_parallel must be true: Megatron trains mixtures of experts "
            f"with tp > 1 in no other way, got tp = {parallel.tp}"
        )


def _stage_problems(
    layers: int, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    """Checks the split of layers over stages, with Megatron's rules for uneven splits."""
    if transformer.get("pipeline_model_parallel_layout") is not None:
        return
    pp, vpp = parallel.pp, parallel.vpp or 1
    first = transformer.get("num_layers_in_first_pipeline_stage")
    last = transformer.get("num_layers_in_last_pipeline_stage")
    counted = [
        key
        for key in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        if transformer.get(key)
    ]
    ends = [number for number in (first, last) if number is not None]
    if ends and counted:
        yield f"learner.transformer.{counted[0]} excludes num_layers_in_first_pipeline_stage"
        return
    if counted:
        total = layers + len(counted)
        if total % (pp * vpp):
            yield (
                f"learner.parallel.pp * vpp must divide the model's {layers} layers "
                f"with {len(counted)} for {' and '.join(counted)}, got {pp * vpp}"
            )
        return
    if not ends:
        if layers % (pp * vpp):
            yield (
                f"learner.parallel.pp * vpp must divide the model's {layers} layers, got {pp * vpp}"
            )
        return
    sizes = [number for number in ends if isinstance(number, int)]
    rest, stages = layers - sum(sizes), pp - len(ends)
    if len(sizes) < len(ends) or min(sizes) < 1 or any(number % vpp for number in sizes):
        yield (
            f"learner.transformer.num_layers_in_first_pipeline_stage and ..last.. must be "
            f"multiples of vpp, got {first} and {last} with vpp = {vpp}"
        )
    elif rest < 0 or stages < 0 or bool(rest) != bool(stages) or (stages and rest % (stages * vpp)):
        yield (
            f"learner.parallel: the {rest} layers between the first and the last stage must be "
            f"shared out evenly over {stages} stages with vpp = {vpp}"
        )
