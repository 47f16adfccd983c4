"""Rules for a model, its parallel layout and its images, which need the model's sizes only.

Functions named `problems` yield one line for each broken rule, with the value and the rule.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import JsonValue
from slipstream.core.models.families import FAMILIES, refusals
from slipstream.core.models.model_sizes import ModelSizes, read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import MLP, LoraSection
from slipstream.core.settings.sections import LearnerSection, ParallelSection

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Why a scaling of the rotary embedding is refused.
_ROPE_REFUSALS = {
    "dynamic": "transformers scales by the length of each sequence, vLLM by the longest possible",
    "longrope": "transformers chooses factors for each sequence, vLLM by the longest possible",
}
# Models with images whose decoder is a text class of ours.
TEXT_ONLY = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
# TransformerEngine's products in FP8 take matrices whose sides are multiples of this.
FP8_MULTIPLE = 16
# Tokens of a cache that hold no part of an episode: vLLM keeps a block of 128 empty, fills the last
# one of a request in part, and samples one token more for a probe.
_SPARE_TOKENS = 512


def model_problems(sizes: ModelSizes) -> Iterator[str]:
    """Yields one line for each reason why no parallel layout can train the model."""
    family = sizes.family
    if not family.architecture:
        kind = "mixture of experts" if sizes.experts else "model"
        hint = ""
        if sizes.architecture in TEXT_ONLY:
            hint = ": docs/guides/models.md shows how to write its text model"
        yield (
            f"model.path holds a {kind} of architecture {sizes.architecture or 'without a name'}, "
            f"which cannot be loaded; known are {', '.join(FAMILIES)}{hint}"
        )
        return
    if sizes.is_quantized:
        yield (f"model.path holds quantized weights, which cannot be trained: {family.conversion}")
    if sizes.uses_sliding_window and not family.has_windows:
        tested = ", ".join(name for name, family_ in FAMILIES.items() if family_.has_windows)
        yield (
            f"model.path holds a {sizes.architecture} with a sliding window, which was tested for "
            f"{tested} only"
        )
    if sizes.rope_type not in ROPE_TYPES:
        cause = _ROPE_REFUSALS.get(sizes.rope_type, "was not tested")
        yield (
            f"model.path: the rope_type must be one of {', '.join(ROPE_TYPES)}, "
            f"got {sizes.rope_type!r}: {cause}"
        )
    if not sizes.experts:
        return
    if sizes.has_dense_layers:
        yield "model.path holds a mixture of experts with dense layers in between: not supported"
    if not 1 <= sizes.experts_per_token <= sizes.experts:
        yield (
            f"model.path: num_experts_per_tok must be 1 to the {sizes.experts} experts, "
            f"got {sizes.experts_per_token}"
        )
    if sizes.experts_per_token == 1 and sizes.normalizes_experts:
        yield ("model.path: norm_topk_prob with one expert per token leaves the router no gradient")


def layout_problems(
    sizes: ModelSizes, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    """Yields one line for each setting of layout or transformer that does not fit the model."""
    tp = parallel.tp
    for number, noun in ((sizes.heads, "attention heads"), (sizes.kv_heads, "key-value heads")):
        if number % tp:
            yield f"learner.parallel.tp must divide the model's {number} {noun}, got {tp}"
    if sizes.dense_layers and sizes.ffn % tp:
        yield f"learner.parallel.tp must divide the intermediate size of {sizes.ffn}, got {tp}"
    yield from refusals(
        sizes.family,
        sizes.architecture,
        {"learner.parallel.etp": (parallel.etp or tp) if sizes.experts else 1},
    )
    # Context parallel ranks exchange tokens for heads.
    name = "learner.parallel.tp" if parallel.cp == 1 else "learner.parallel.tp times cp"
    for number in sizes.linear_heads:
        if number % (tp * parallel.cp):
            yield f"{name} must divide the {number} heads of delta nets, got {tp * parallel.cp}"
    yield from _stage_problems(sizes.layers, parallel, transformer)
    yield from _expert_problems(sizes, parallel, transformer)
    if sizes.latent_size and (sizes.latent_size % tp or sizes.query_latent_size % tp):
        yield (
            "learner.parallel.tp must divide q_lora_rank and kv_lora_rank + qk_rope_head_dim, "
            f"{sizes.query_latent_size} and {sizes.latent_size}, got {tp}"
        )


def adapter_problems(lora: LoraSection, sizes: ModelSizes, tp: int) -> Iterator[str]:
    """Yields one line for each setting of adapters that the model, split over `tp`, excludes.

    vLLM applies adapters to fused experts on GPUs only, and reads these adapters in another format.
    """
    experts = sizes.family.experts
    adapter_names = ", ".join(lora.adapters)
    rule = "lora.publish must be merged"
    value = repr(lora.publish)
    if lora.adapters:
        rule = "lora.adapters must be empty"
        value = adapter_names
    cause = ""
    if experts is not None and experts.is_fused:
        cause = (
            "model whose files hold one tensor for all experts of a layer: adapters of single "
            "experts have no names there"
        )
    elif experts is not None and not experts.is_found_by_peft:
        cause = f"{sizes.architecture}: PEFT does not find its experts by their names in files"
    if cause and lora.has_mlp:
        yield (
            f"lora.target_modules must leave {' and '.join(MLP)} out for a {cause}, "
            f"got {', '.join(lora.target_modules)}"
        )
    elif sizes.experts and lora.has_mlp and lora.publishes_adapters:
        yield (
            f"{rule} with adapters on experts, got {value}: or leave {' and '.join(MLP)} out of "
            "lora.target_modules"
        )
    if sizes.latent_size and lora.publishes_adapters:
        yield (
            f"{rule} for a model with latent attention, got {value}: vLLM multiplies kv_b_proj "
            "into other matrices once, without adapters"
        )
    if lora.rank and sizes.latent_size and tp > 1:
        yield (
            f"learner.parallel.tp must be 1 for adapters in a model with latent attention, got {tp}"
        )


def agreement_problems(sizes: ModelSizes, agreement: str) -> Iterator[str]:
    """Yields one line if `agreement` is "bits", and learner and engine compute different bits."""
    if agreement != "bits":
        return
    family = sizes.family
    if not family.has_engine_bits:
        proven = ", ".join(name for name, family_ in FAMILIES.items() if family_.has_engine_bits)
        yield (
            f"algorithm.agreement = 'bits' was shown for {proven}: the layers of a "
            f"{sizes.architecture} have kernels in the engine that the learner has not"
        )
    elif sizes.uses_sliding_window or sizes.rope_type != "default":
        what = "sliding windows" if sizes.uses_sliding_window else f"rope_type {sizes.rope_type!r}"
        yield (
            f"algorithm.agreement = 'bits' needs full attention and the default rope_type: the "
            f"learner has no kernel of the engine's for {what}, which model.path has"
        )


def fp8_problems(sizes: ModelSizes, learner: LearnerSection) -> Iterator[str]:
    """Yields one line if TransformerEngine cannot compute the model's matrices in FP8.

    Source: `assert_dim_for_fp8_exec` of TransformerEngine 2.11.
    """
    if learner.fp8 == "off":
        return
    start = f"learner.fp8 = {learner.fp8!r} needs "
    untried = {
        "experts": sizes.experts,
        "delta nets": sizes.family.is_delta,
        "a vision tower": sizes.has_vision,
    }
    for noun, is_there in untried.items():
        if is_there:
            yield f"{start}a model.path without {noun}, which was not tried in it"
    tp = learner.parallel.tp
    queries = sizes.heads * sizes.head_dim
    keys = sizes.kv_heads * sizes.head_dim
    widths = {
        "hidden size": sizes.hidden,
        "intermediate size on a rank": sizes.ffn // tp,
        "number of rows of queries on a rank": queries // tp,
        "number of rows of keys on a rank": keys // tp,
    }
    for noun, width in widths.items():
        if width % FP8_MULTIPLE:
            yield f"{start}multiples of {FP8_MULTIPLE}, and the {noun} of model.path is {width}"


def _expert_problems(
    sizes: ModelSizes, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    ep = parallel.ep
    etp = parallel.etp or parallel.tp
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
    if sizes.expert_ffn % etp:
        yield (
            f"learner.parallel.etp (None: tp) must divide the experts' intermediate size of "
            f"{sizes.expert_ffn}, got {etp}"
        )
    if parallel.tp > 1 and not transformer.get("sequence_parallel", True):
        yield (
            "learner.transformer.sequence_parallel must be true: Megatron trains mixtures of "
            f"experts with tp > 1 in no other way, got tp = {parallel.tp}"
        )


def _stage_problems(
    layers: int, parallel: ParallelSection, transformer: dict[str, JsonValue]
) -> Iterator[str]:
    """Yields a line if the layers cannot be split over the stages by Megatron's rules."""
    if transformer.get("pipeline_model_parallel_layout") is not None:
        return
    pp = parallel.pp
    vpp = parallel.vpp or 1
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
    if not ends:
        more = f" with {len(counted)} for {' and '.join(counted)}" if counted else ""
        if (layers + len(counted)) % (pp * vpp):
            yield (
                f"learner.parallel.pp * vpp must divide the model's {layers} layers{more}, "
                f"got {pp * vpp}"
            )
        return
    sizes = [number for number in ends if isinstance(number, int)]
    rest = layers - sum(sizes)
    stages = pp - len(ends)
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


def stage_problems(sizes: ModelSizes, stages: int, *, has_tower: bool) -> Iterator[str]:
    """Yields a line for each reason why an engine of `stages` cannot have the model.

    `has_tower`: the model sees images.
    """
    if stages > 1 and has_tower:
        yield (
            "rollout_server.pipeline_parallel_size must be 1 for a model with a vision tower, "
            f"which was not tried in stages, got {stages}"
        )
    if stages > max(1, sizes.layers):
        yield (
            f"rollout_server.pipeline_parallel_size must be at most the model's {sizes.layers} "
            f"layers, got {stages}"
        )
    if stages > 1 and sizes.family.is_delta:
        yield (
            "rollout_server.pipeline_parallel_size must be 1 for a model with delta nets, which "
            f"were not tried in stages, got {stages}"
        )
    if stages > 1 and sizes.experts and sizes.layers // stages <= sizes.dense_layers:
        yield (
            "rollout_server.pipeline_parallel_size must leave a layer with experts to the first "
            f"stage: {sizes.dense_layers} of {sizes.layers} layers have none, got {stages}"
        )


def cpu_cache_bytes(config: Config) -> int:
    """Returns the bytes of a CPU worker's cache: as set, or the longest episode, 1 GiB at least."""
    server = config.rollout_server
    passed = server.engine.get("kv_cache_memory_bytes")
    if isinstance(passed, int):
        return passed
    sizes = read_model_sizes(config.model.path)
    item_bytes = 4 if config.model.dtype == "float32" else 2
    per_token = sizes.cache_bytes_per_token(
        item_bytes, server.tensor_parallel_size, stages=server.pipeline_parallel_size
    )
    return max(1 << 30, (config.sampling.max_episode_tokens + _SPARE_TOKENS) * per_token)


def cpu_engine_problems(config: Config) -> Iterator[str]:
    """Yields one line for each setting that vLLM does not support on a CPU; reads config.json."""
    server = config.rollout_server
    dtype = config.model.dtype
    sizes = read_model_sizes(config.model.path)
    if sizes.experts and server.quantization != "off":
        yield (
            "rollout_server.quantization must be off for a mixture of experts on a CPU: vLLM has "
            f"no kernel there that quantises experts, got {server.quantization!r}"
        )
    if server.engine.get("enable_expert_parallel"):
        yield (
            "rollout_server.engine.enable_expert_parallel must be left out on a CPU: vLLM's kernel "
            "there finds an expert by its place in one worker, and would end the engine"
        )
    if config.algorithm.agreement == "bits" and not server.is_eager(on_cpu=True):
        yield "rollout_server.enforce_eager must be left out with algorithm.agreement = 'bits'"
    if sizes.linear_heads and server.drafts:
        yield (
            "rollout_server.engine.speculative_config is not supported on a CPU for a model with "
            "delta nets: vLLM takes their states back with a kernel for GPUs"
        )
    # On a CPU, vLLM's delta nets fail at the first request in any other type.
    if sizes.family.is_delta and dtype != "bfloat16":
        yield (
            'model.dtype must be "bfloat16" for a model with delta nets whose rollout servers run '
            f"on a CPU: vLLM computes them in no other type there, got {dtype!r}"
        )
    # With any adapter, vLLM 0.32.0 computes experts with a kernel that needs a GPU.
    if sizes.experts and config.lora.publishes_adapters:
        yield (
            "lora.publish must be merged for a mixture of experts on a CPU: vLLM's kernel for "
            "experts beside adapters needs a GPU"
        )


def vocabulary_problems(folder: Path) -> Iterator[str]:
    """Yields a line if texts have tokens, by the folder's tokenizer, that its model lacks.

    Added tokens are no part of texts: Gemma has one beyond its vocabulary. A template that writes
    such a token is refused when it is tried.
    """
    path = folder / "tokenizer.json"
    try:
        table = json.loads(path.read_bytes())
        vocabulary = table["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        # There is none, or the tokenizer's own loader tells what is wrong with it.
        return
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    largest = max(numbers, default=-1)
    size = read_model_sizes(folder).vocab
    if largest >= size > 0:
        yield (
            f"model.path must hold its model's own tokenizer, but {path} has a token {largest}, "
            f"and config.json only {size} (vocab_size): copy the tokenizer that came with the "
            "weights, or give the model a row of embeddings for each token"
        )


def vision_problems(config: Config, sizes: ModelSizes) -> Iterator[str]:
    """Yields one line for each conflict between a model and the run's settings for images."""
    if not sizes.has_vision:
        if config.sampling.max_images:
            yield (
                f"sampling.max_images must be 0 for a {sizes.architecture}, which sees no images, "
                f"got {config.sampling.max_images}"
            )
        return
    token = sizes.image_token
    vocab = sizes.vocab
    if not isinstance(token, int) or token < 0 or token >= vocab > 0:
        yield (
            f"model.path: image_token_id of a {sizes.architecture} must be a token of the "
            f"vocabulary, 0 to {vocab - 1}, got {token!r}"
        )
    yield from vision_layout_problems(config.learner, sizes)
    server = config.rollout_server
    reference = config.reference
    has_images = config.sampling.max_images > 0
    if server.quantization != "off" and (has_images or sizes.experts):
        kind = "images" if has_images else "experts beside a vision tower"
        yield (
            f'rollout_server.quantization must be "off" for a {sizes.architecture} with {kind}: it '
            f"was not tested, got {server.quantization!r}"
        )
    for setting in reference.servers if reference is not None else ():
        path = f"{setting.removesuffix('.server')}.path"
        yield f"{setting} gets no images: a {sizes.architecture} needs {path}"


def vision_layout_problems(learner: LearnerSection, sizes: ModelSizes) -> Iterator[str]:
    """Yields one line for each setting of the learner that excludes a model with vision."""
    if learner.parallel.cp > 1:
        yield (
            f"learner.parallel.cp must be 1 for a {sizes.architecture}: chunks of a sequence would "
            f"cut its images, got {learner.parallel.cp}"
        )
    if sizes.deep_layers and learner.transformer.get("recompute_granularity") == "full":
        yield (
            "learner.transformer.recompute_granularity must be selective or left out for a "
            f"{sizes.architecture}: features of images are added between its layers, got 'full'"
        )
