"""The models of Tinker's line-up, each with the class that trains it here or why none does.

The names are those of `model_info.py` in tinker-cookbook 0.6.1. `generate_models.py` writes the
table into docs/guides/models.md, and a test holds it against the families.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.core.models.families import FAMILIES, Family


@dataclass(frozen=True)
class Entry:
    """Models of one class; `architecture` is "" if no class trains them, and `cause` says why."""

    names: tuple[str, ...]
    architecture: str = ""
    cause: str = ""


LINE_UP = (
    Entry(
        (
            "Llama-3.1-8B-Instruct",
            "Llama-3.1-8B",
            "Llama-3.1-70B",
            "Llama-3.2-1B",
            "Llama-3.2-3B",
            "Llama-3.3-70B-Instruct",
        ),
        "LlamaForCausalLM",
    ),
    Entry(
        ("Qwen3-4B-Instruct-2507", "Qwen3-8B", "Qwen3-8B-Base", "Qwen3-32B"),
        "Qwen3ForCausalLM",
    ),
    Entry(
        (
            "Qwen3-30B-A3B",
            "Qwen3-30B-A3B-Base",
            "Qwen3-30B-A3B-Instruct-2507",
            "Qwen3-235B-A22B-Instruct-2507",
        ),
        "Qwen3MoeForCausalLM",
    ),
    Entry(
        ("Qwen3-VL-30B-A3B-Instruct", "Qwen3-VL-235B-A22B-Instruct"),
        "Qwen3VLMoeForConditionalGeneration",
    ),
    Entry(
        (
            "Qwen3.5-4B",
            "Qwen3.5-9B",
            "Qwen3.5-9B-Base",
            "Qwen3.5-27B",
            "Qwen3.6-27B",
            "Qwen3.8-27B",
        ),
        "Qwen3_5ForConditionalGeneration",
    ),
    Entry(
        ("Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-Base", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B"),
        "Qwen3_5MoeForConditionalGeneration",
    ),
    Entry(("gpt-oss-20b", "gpt-oss-120b"), "GptOssForCausalLM"),
    Entry(
        ("DeepSeek-V3.1", "DeepSeek-V3.1-Base", "Kimi-K2-Thinking"),
        "DeepseekV3ForCausalLM",
    ),
    Entry(("Kimi-K2.5", "Kimi-K2.6"), "KimiK25ForConditionalGeneration"),
    Entry(
        (
            "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
            "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
            "NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
            "NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16",
        ),
        cause="Mamba layers: `megatron.core.ssm.mamba_mixer` needs the kernels of mamba-ssm, "
        "which have no form for CPUs, and no layer here replaces it",
    ),
    Entry(
        ("GLM-5.3", "GLM-5.3-Flash"),
        cause="sparse attention: `megatron.core.transformer.experimental_attention_variant.dsa` "
        "turns its keys with fast-hadamard-transform, which has no form for CPUs",
    ),
    Entry(
        ("DeepSeek-V4.1-Flash", "DeepSeek-V4.1-Flash-1017"),
        cause="Bridge's `megatron.bridge.models.deepseek.deepseek_v4_bridge` sets fields, such as "
        "`csa_compress_ratios`, that `megatron.core.transformer.transformer_config` lacks",
    ),
    Entry(
        ("Kimi-K3.1-Pro",),
        cause="transformers 5.19 (`transformers.models`) and Bridge (`megatron.bridge.models`) "
        "have no class of it, vLLM alone has `vllm.models.kimi_k3`",
    ),
    Entry(
        ("Inkling", "Inkling-Small", "Inkling-2-Small"),
        cause="`megatron.bridge.models` and Megatron-Core have no class of it",
    ),
)


def adapters(family: Family) -> str:
    """Returns what may have adapters, and how rollout servers get them."""
    experts = family.experts
    is_bare = experts is not None and (experts.is_fused or not experts.is_found_by_peft)
    parts = "all but experts" if is_bare else "all"
    is_merged = "kv_lora_rank" in family.read or "lora.publish" in family.cannot
    if is_merged:
        return f"{parts}, merged"
    return f"{parts}; experts merged" if experts is not None and not is_bare else parts


def lines() -> Iterator[str]:
    """Yields the lines of the table, after one with the sums."""
    trained = sum(len(entry.names) for entry in LINE_UP if entry.architecture)
    total = sum(len(entry.names) for entry in LINE_UP)
    yield f"{trained} of these {total} have a class that trains, each with adapters:"
    yield ""
    yield "| models | class | adapters |"
    yield "|---|---|---|"
    for entry in LINE_UP:
        names = ", ".join(entry.names)
        if entry.architecture:
            kinds = adapters(FAMILIES[entry.architecture])
            yield f"| {names} | `{entry.architecture}` | {kinds} |"
        else:
            yield f"| {names} | none: {entry.cause} | |"
