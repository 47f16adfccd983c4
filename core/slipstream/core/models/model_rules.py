"""Rules for a model and its parallel layout, checked by its sizes alone.

Each function yields one line for each broken rule, with the value and the rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue
from slipstream.core.models.hybrid_layers import NEMOTRON_H
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.models.nested_decoders import NESTED
from slipstream.core.models.rope_fields import QWEN35, VISION
from slipstream.core.settings.sections import ParallelSection, RolloutServerSection

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
    NEMOTRON_H,
    *QWEN35,
    *VISION,
)
# Architectures whose files hold one tensor for all experts of a layer.
FUSED_EXPERTS = ("GptOssForCausalLM", VISION[2])
# Architectures whose windows the learner, transformers and vLLM compute alike.
WINDOWED = (
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
)
# Architectures that vLLM (0.32.0) refuses in float16, whatever their weights are.
NOT_IN_FLOAT16 = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Why a scaling of the rotary embedding is refused.
_ROPE_REFUSALS = {
    "dynamic": "transformers scales by the length of each sequence, vLLM by the longest possible",
    "longrope": "transformers chooses factors for each sequence, vLLM by the longest possible",
}


def model_problems(sizes: ModelSizes) -> Iterator[str]:
    """Checks a model, for any layout."""
    if sizes.architecture not in ARCHITECTURES:
        kind = "mixture of experts" if sizes.experts else "model"
        yield (
            f"model.path holds a {kind} of architecture {sizes.architecture or 'without a name'}, "
            f"which cannot be loaded; known are {', '.join((*ARCHITECTURES, *NESTED))}"
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
        return ": take the folder in bfloat16"
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
        yield from _linear_problems(sizes, parallel)
    yield from _stage_problems(sizes.layers, parallel, transformer)
    yield from _expert_problems(sizes, parallel, transformer)
    if sizes.latent_size and (sizes.latent_size % tp or sizes.query_latent_size % tp):
        yield (
            "learner.parallel.tp must divide q_lora_rank and kv_lora_rank + qk_rope_head_dim, "
            f"{sizes.query_latent_size} and {sizes.latent_size}, got {tp}"
        )


def _linear_problems(sizes: ModelSizes, parallel: ParallelSection) -> Iterator[str]:
    if parallel.cp > 1:
        yield (
            f"learner.parallel.cp must be 1 for a {sizes.architecture}: {sizes.linear_name} read "
            f"the tokens of a sequence in turn, got {parallel.cp}"
        )
    for number in sizes.linear_heads:
        if number % parallel.tp:
            yield (
                f"learner.parallel.tp must divide the {number} heads or groups of "
                f"{sizes.linear_name}, got {parallel.tp}"
            )


def linear_problems(sizes: ModelSizes, server: RolloutServerSection) -> Iterator[str]:
    """Yields one line for each setting with which vLLM's layers that read tokens in turn fail."""
    drafts, rollout_tp = server.drafts, server.tensor_parallel_size
    if sizes.linear_heads and drafts != "off":
        yield (
            f'rollout_server.drafts must be "off" for a model with {sizes.linear_name}: vLLM takes '
            f"their state back with a kernel for GPUs, where that was not tested, got {drafts!r}"
        )
    if not sizes.has_mamba:
        return
    if server.quantization != "off":
        yield (
            f'rollout_server.quantization must be "off" for a {sizes.architecture}: it was not '
            f"tested with Mamba layers, got {server.quantization!r}"
        )
    groups, heads = sizes.linear_heads
    if heads % rollout_tp or (groups > 1 and groups % rollout_tp):
        yield (
            f"rollout_server.tensor_parallel_size must divide the {groups} groups and {heads} "
            f"heads of Mamba layers, got {rollout_tp}"
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
