"""Makes a random model of each family that is trained, at true width with few layers, or tiny.

    python -m benchmarks.agreement.family_shapes gpt-oss FOLDER
    python -m benchmarks.agreement.family_shapes gpt-oss FOLDER --tiny

Widths are those of a published model; the vocabulary is smaller, and the largest mixtures have
fewer experts, so that one GPU of 141 GB holds several models with gradients and engines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.shapes import make_tokenizer

VOCAB = 32768
TINY_VOCAB = 256
# Episodes are longer than the windows.
WINDOW = 32
ROPE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e5,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
}
LATENT_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
# Sizes that kernels of vLLM for a CPU take; latent attention keeps its true sizes of heads.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rotary_dim": 16,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "q_lora_rank": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
TINY_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
}
# Sides of images in pixels, before and after the tower's processor.
IMAGE_SIDE = 56
LARGEST_SIDE = 448


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what its config.json says beside the common fields."""

    name: str
    values: dict[str, Any]
    layers: int = 4
    # rollout_server.engine on a GPU.
    engine: dict[str, Any] = field(default_factory=dict)
    # Fields of the vision tower; {} without one.
    tower: dict[str, Any] = field(default_factory=dict)
    # Fields of a tower that is not trained, beside the text model; {} without one.
    idle_tower: dict[str, Any] = field(default_factory=dict)
    # Entries of config.json in place of the names of the class of transformers.
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        """Whether there are routers that can be replayed: in mixtures."""
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(name in self.values for name in counts)

    def settings(self, *, tiny: bool) -> dict[str, Any]:
        values = dict(self.values)
        if tiny:
            values |= {key: TINY[key] for key, value in values.items() if key in TINY and value}
            if values.get("n_group") and self.values["n_group"] == 1:
                values |= {"n_group": 1, "topk_group": 1}
            if "kv_lora_rank" in values:
                values["num_key_value_heads"] = values["num_attention_heads"]
        common = {
            "vocab_size": TINY_VOCAB if tiny else VOCAB,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
        }
        if tiny and "mrope_section" in values.get("rope_parameters", {}):
            # Half of what is turned of a head has so many frequencies.
            is_part = "partial_rotary_factor" in values["rope_parameters"]
            sections = [2, 1, 1] if is_part else [4, 6, 6]
            values["rope_parameters"] = values["rope_parameters"] | {"mrope_section": sections}
        return {**common, "rope_parameters": ROPE, **values}

    @property
    def architecture(self) -> str:
        task = "ConditionalGeneration" if self.tower or self.idle_tower else "CausalLM"
        return f"{self.name.removesuffix('Text')}For{task}"

    def config(self, *, tiny: bool) -> Any:  # noqa: ANN401 - transformers' configuration
        import transformers

        settings = self.settings(tiny=tiny)
        if self.tower:
            smaller = {name: size for name, size in TINY_TOWER.items() if name in self.tower}
            tower = self.tower | (smaller if tiny else {})
            ids = zip(("vision_start", "image", "video", "vision_end"), range(4, 8), strict=True)
            settings = {
                "text_config": settings,
                "vision_config": tower | {"out_hidden_size": settings["hidden_size"]},
                "tie_word_embeddings": False,
                **{f"{name}_token_id": number for name, number in ids},
            }
        if self.idle_tower:
            settings = {
                "text_config": settings,
                "vision_config": self.idle_tower,
                "projection_hidden_size": self.idle_tower["hidden_size"],
                "tie_word_embeddings": False,
            }
        return getattr(transformers, f"{self.name}Config")(**settings)


def _heads(hidden: int, inner: int, heads: int, groups: int, size: int = 0) -> dict[str, Any]:
    """Returns sizes of attention; `size` 0 leaves that of a head to the class."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        **({"head_dim": size} if size else {}),
    }


def _latent(hidden: int, inner: int, heads: int, queries: int) -> dict[str, Any]:
    return _heads(hidden, inner, heads, heads) | {
        "q_lora_rank": queries,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "first_k_dense_replace": 1,
    }


def _routed(experts: int, chosen: int, inner: int, shared: int) -> dict[str, Any]:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "num_nextn_predict_layers": 0,
    }


def _groups(groups: int, chosen: int, method: str, scoring: str, factor: float) -> dict[str, Any]:
    return {
        "n_group": groups,
        "topk_group": chosen,
        "topk_method": method,
        "scoring_func": scoring,
        "routed_scaling_factor": factor,
    }


def _tower(patch: int, hidden: int, inner: int) -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": 16,
        "patch_size": patch,
        "spatial_merge_size": 2,
    }


# With embeddings of the usual size, which the class multiplies, a random model repeats its input.
_GEMMA = {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.01,
}
_SIGMOID = ("noaux_tc", "sigmoid", 2.5)
_NEXT = {
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
}
_DEEP_ROPE = ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_THIRD_TOWER = _tower(16, 1152, 4304) | {"num_position_embeddings": 2304}
_DEEP_TOWER = _THIRD_TOWER | {"deepstack_visual_indexes": [1, 2]}
# Qwen3.5 turns a quarter of each head.
_NETS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_parameters": ROPE
    | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}
# FlashInfer's kernel is compiled for minutes first. States of delta nets take much memory.
_NETS_ENGINE = {"gdn_prefill_backend": "triton", "kv_cache_memory_bytes": 6 << 30}
FAMILIES = {
    "qwen3": Family("Qwen3", _heads(4096, 12288, 32, 8, 128)),
    "llama": Family("Llama", _heads(4096, 14336, 32, 8, 128)),
    "qwen2": Family("Qwen2", _heads(3584, 18944, 28, 4)),
    "mistral": Family("Mistral", _heads(4096, 14336, 32, 8, 128) | {"sliding_window": WINDOW}),
    "ministral3": Family(
        "Ministral3",
        _heads(4096, 14336, 32, 8, 128)
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "olmo2": Family("Olmo2", _heads(4096, 11008, 32, 32, 128)),
    "gemma3": Family(
        "Gemma3Text",
        _heads(3840, 15360, 16, 8, 256)
        | _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": ROPE | {"rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "qwen3-moe": Family(
        "Qwen3Moe",
        _heads(2048, 6144, 32, 4, 128)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True},
        layers=2,
    ),
    "glm-4.5": Family(
        "Glm4Moe",
        _heads(4096, 10944, 96, 8, 128)
        | _routed(16, 8, 1408, 1)
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"attention_bias": True, "routed_scaling_factor": 1.0}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        layers=2,
    ),
    "deepseek-v3": Family(
        "DeepseekV3",
        _latent(7168, 18432, 128, 1536)
        | _routed(32, 8, 2048, 1)
        | _groups(8, 4, *_SIGMOID)
        | {"rope_parameters": LATENT_YARN},
        layers=2,
    ),
    "kimi-k2": Family(
        "DeepseekV3",
        _latent(7168, 18432, 64, 1536)
        | _routed(32, 8, 2048, 1)
        | _groups(1, 1, "noaux_tc", "sigmoid", 2.827)
        | {"rope_parameters": LATENT_YARN},
        layers=2,
        names={"model_type": "kimi_k2"},
    ),
    "kimi-k2.5": Family(
        "Kimi_K25",
        _latent(7168, 18432, 64, 1536)
        | _routed(32, 8, 2048, 1)
        | _groups(1, 1, "noaux_tc", "sigmoid", 2.827)
        | {"rope_parameters": LATENT_YARN, "model_type": "deepseek_v3"},
        layers=2,
        idle_tower={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        names={"architectures": ["KimiK25ForConditionalGeneration"]},
    ),
    "glm-4.7-flash": Family(
        "Glm4MoeLite",
        _latent(2048, 10240, 20, 768)
        | {"qk_nope_head_dim": 192, "v_head_dim": 256}
        | _routed(64, 4, 1536, 1)
        | _groups(1, 1, "noaux_tc", "sigmoid", 1.8),
        layers=2,
    ),
    "minimax-m2": Family(
        "MiniMaxM2",
        _heads(3072, 1536, 48, 8, 128)
        | {"num_local_experts": 64, "num_experts_per_tok": 8, "rotary_dim": 64}
        | {"scoring_func": "sigmoid", "use_routing_bias": True}
        | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        layers=2,
    ),
    "smollm3": Family("SmolLM3", _heads(2048, 11008, 16, 4) | {"no_rope_layers": [1, 1, 1, 0]}),
    "mimo": Family(
        "Qwen2",
        _heads(4096, 11008, 32, 8),
        names={"model_type": "mimo", "architectures": ["MiMoForCausalLM"]},
    ),
    "gpt-oss": Family(
        "GptOss",
        _heads(2880, 2880, 64, 8, 64)
        | {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": WINDOW}
        | {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        layers=2,
    ),
    "qwen3-next": Family(
        "Qwen3Next",
        _heads(2048, 5120, 16, 2, 256) | _NEXT,
        engine=_NETS_ENGINE,
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VL",
        _heads(3584, 18944, 28, 4) | {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}},
        tower=_tower(14, 1280, 3420)
        | {"window_size": 112, "fullatt_block_indexes": [3], "hidden_act": "silu"},
    ),
    "qwen3-vl": Family(
        "Qwen3VL",
        _heads(4096, 12288, 32, 8, 128) | {"rope_parameters": _DEEP_ROPE},
        tower=_DEEP_TOWER,
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoe",
        _heads(2048, 6144, 32, 4, 128)
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True, "rope_parameters": _DEEP_ROPE},
        tower=_DEEP_TOWER,
    ),
    "qwen3.5": Family(
        "Qwen3_5",
        _heads(4096, 12288, 16, 4, 256) | _NETS,
        engine=_NETS_ENGINE,
        tower=_THIRD_TOWER,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5Moe",
        _heads(2048, 512, 16, 2, 256)
        | {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512}
        | _NETS,
        engine=_NETS_ENGINE,
        tower=_THIRD_TOWER,
    ),
}


def make_family(
    folder: Path, name: str, *, tiny: bool, layers: int = 0, values: Mapping[str, Any] | None = None
) -> Path:
    """Writes a random model of the family `name` in bfloat16, with a tokenizer.

    `layers` replaces the family's number unless 0, and `values` its fields of those names.
    """
    import torch

    family = FAMILIES[name]
    more = {"layers": layers or family.layers, "values": family.values | dict(values or {})}
    family = replace(family, **more)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = family.settings(tiny=tiny)["vocab_size"]
    make_tokenizer(folder, vocab, sees_images=bool(family.tower))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = _random_model(family, tiny=tiny)
        # A fresh model's biases, sinks and norms are all alike: one in the wrong place would not
        # show.
        for place, parameter in model.named_parameters():
            if parameter.dim() == 1 or place.endswith("_bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for place, buffer in model.named_buffers():
            if place.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
        for place, parameter in model.named_parameters():
            if name == "qwen3-vl-moe" and ".experts." in place:
                # Published files have these as tokens are multiplied by them.
                parameter.data = parameter.mT.contiguous()
    # Published files of Qwen3.5 have the experts of a layer in one tensor, as transformers does.
    is_joined = name == "qwen3.5-moe"
    model.save_pretrained(folder, max_shard_size="4GB", save_original_format=not is_joined)
    if family.idle_tower:
        _name_layers(folder)
    if family.names:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.names, indent=2))
    if family.tower:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

        size = {"shortest_edge": IMAGE_SIDE**2, "longest_edge": LARGEST_SIDE**2}
        processor = qwen2_vl.Qwen2VLImageProcessorPil(
            patch_size=family.tower["patch_size"], size=size
        )
        processor.save_pretrained(folder)
    return folder


def count_parameters(name: str, *, tiny: bool) -> int:
    """Returns the parameters of the model that `make_family` makes, without making it."""
    import torch

    with torch.device("meta"):
        model = _random_model(FAMILIES[name], tiny=tiny)
    return sum(parameter.numel() for parameter in model.parameters())


def _random_model(family: Family, *, tiny: bool) -> Any:  # noqa: ANN401 - transformers' model
    import torch
    import transformers

    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    config = family.config(tiny=tiny)
    config.dtype = torch.bfloat16
    return kinds[bool(family.tower or family.idle_tower)].from_config(config, dtype=torch.bfloat16)


def _name_layers(folder: Path) -> None:
    """Gives the tensors their published names: transformers 5.19 saves a Kimi K2.5 with others."""
    from safetensors.torch import load_file, save_file

    index = folder / "model.safetensors.index.json"
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({_published(name): tensors[name] for name in tensors}, path, {"format": "pt"})
    if index.is_file():
        table = json.loads(index.read_text())
        files = table["weight_map"]
        table["weight_map"] = {_published(name): file for name, file in files.items()}
        index.write_text(json.dumps(table))


def _published(name: str) -> str:
    return name.replace("model.blocks.", "model.layers.").removeprefix("model.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("family", choices=tuple(FAMILIES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--layers", type=int, default=0, help="0: a few")
    parser.add_argument("--values", default="{}", help="fields of config.json, as JSON")
    arguments = parser.parse_args()
    values = json.loads(arguments.values)
    sizes = {"tiny": arguments.tiny, "layers": arguments.layers, "values": values}
    make_family(arguments.folder, arguments.family, **sizes)


if __name__ == "__main__":
    sys.exit(main())
