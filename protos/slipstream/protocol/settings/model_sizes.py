"""Sizes from a model's config.json, on which the parallel layout depends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.model_fields import has_tied_output
from slipstream.protocol.settings.rope_fields import rope_table


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder; 0 if config.json lacks the field."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    # Length of the longest sequence, and the field of config.json that decides it.
    max_positions: int
    max_positions_field: str
    # Mixture of experts: their number, the number for each token, their intermediate size.
    experts: int
    experts_per_token: int
    expert_ffn: int
    # Intermediate size of the expert that every token goes to; 0: there is none.
    shared_expert_ffn: int
    # Whether the weights of a token's experts add up to 1.
    normalizes_experts: bool
    # Whether layers with and without experts alternate in a mixture of experts.
    has_dense_layers: bool
    # Number of layers without experts, the first ones.
    dense_layers: int
    # Groups of experts, and the number of them that a token may choose from; 0: none.
    expert_groups: int
    chosen_groups: int
    # Latent attention: size of a token's vector for keys and values with the positions' part, and
    # of that for queries; 0: there is none.
    latent_size: int
    query_latent_size: int
    # Heads of keys and values of delta nets; () without delta nets.
    linear_heads: tuple[int, ...]
    norm_eps: float
    has_tied_output: bool
    rope_type: str
    # All settings of the rotary embedding by their names.
    rope: tuple[tuple[str, Any], ...]
    uses_sliding_window: bool
    is_quantized: bool
    # Whether there is a vision tower, and the number of layers behind which it adds features.
    has_vision: bool
    deep_layers: int

    def cache_bytes_per_token(self, item_bytes: int, tp: int) -> int:
        """Returns the bytes of a token's keys and values in the cache of one of `tp` workers."""
        if self.latent_size:
            # Every worker holds all of it.
            return self.layers * self.latent_size * item_bytes
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * item_bytes

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelSizes:
        """Reads the table of a config.json, as transformers 4 or 5 writes it."""

        def number(*names: str) -> int:
            found = next((values[name] for name in names if isinstance(values.get(name), int)), 0)
            return int(found)

        rope = rope_table(values)
        names = values.get("architectures") or [""]
        heads, layers = number("num_attention_heads"), number("num_hidden_layers")
        experts = number("num_experts", "num_local_experts", "n_routed_experts")
        latent = number("kv_lora_rank")
        # vLLM does not scale queries beyond these positions, as transformers does.
        is_limited = rope.get("llama_4_scaling_beta")
        limit = "original_max_position_embeddings" if is_limited else "max_position_embeddings"
        limits = rope if is_limited else values
        return cls(
            architecture=str(names[0]),
            vocab=number("vocab_size"),
            hidden=number("hidden_size"),
            layers=layers,
            heads=heads,
            kv_heads=number("num_key_value_heads") or heads,
            head_dim=number("head_dim") or number("hidden_size") // max(1, heads),
            ffn=number("intermediate_size"),
            max_positions=int(limits.get(limit) or 0),
            max_positions_field=limit,
            experts=experts,
            experts_per_token=number("num_experts_per_tok"),
            expert_ffn=number("moe_intermediate_size", "intermediate_size"),
            shared_expert_ffn=number("shared_expert_intermediate_size")
            or number("n_shared_experts") * number("moe_intermediate_size"),
            normalizes_experts=normalizes_experts(values),
            has_dense_layers=bool(values.get("mlp_only_layers"))
            or values.get("decoder_sparse_step", 1) != 1,
            dense_layers=number("first_k_dense_replace") if experts else layers,
            expert_groups=number("n_group"),
            chosen_groups=number("topk_group"),
            latent_size=latent and latent + number("qk_rope_head_dim"),
            query_latent_size=number("q_lora_rank"),
            linear_heads=tuple(
                number(name)
                for name in ("linear_num_key_heads", "linear_num_value_heads")
                if number(name)
            ),
            norm_eps=values.get("rms_norm_eps", 0.0),
            has_tied_output=has_tied_output(values),
            rope=tuple(sorted({"rope_theta": values.get("rope_theta"), **rope}.items())),
            rope_type=str(rope.get("rope_type", rope.get("type", "default"))).replace(
                "mrope", "default"
            ),
            uses_sliding_window=bool(
                values.get("use_sliding_window", values.get("sliding_window"))
            ),
            is_quantized="quantization_config" in values,
            has_vision=bool(values.get("vision_config")),
            deep_layers=len(
                (values.get("vision_config") or {}).get("deepstack_visual_indexes") or ()
            ),
        )


def normalizes_experts(values: Mapping[str, Any]) -> bool:
    """Whether the weights of a token's experts add up to 1, by the table of a config.json.

    Those of Mixtral and gpt-oss always do, without a field in their tables.
    """
    always = values.get("model_type") in ("mixtral", "gpt_oss")
    return bool(values.get("norm_topk_prob", always))


def read_model_sizes(folder: Path) -> ModelSizes:
    """Returns the sizes of a Hugging Face folder; ConfigError like `read_model_table`."""
    return ModelSizes.of(read_model_table(folder))


def read_model_table(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a Hugging Face folder; ConfigError if it cannot be read."""
    path = folder / "config.json"
    if not folder.is_dir():
        # Relative paths: a run is exported or replayed in the folder in which it was started.
        here = "" if folder.is_absolute() else f" below {Path.cwd()}"
        raise ConfigError(
            f"model.path must be a Hugging Face folder, got {folder}, which does not exist{here}"
            f"{_download(folder)}"
        )
    if not path.is_file():
        raise ConfigError(
            f"model.path must be a Hugging Face folder, but {folder} has no config.json"
        )
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a table, got a {type(values).__name__}")
    return decoder_table(values)


def decoder_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the fields of its decoder, which models with vision nest."""
    decoder = values.get("text_config")
    if not isinstance(decoder, Mapping):
        return dict(values)
    outer = {name: value for name, value in values.items() if name != "text_config"}
    return {**decoder, **outer}


def _download(folder: Path) -> str:
    """Returns advice if the path looks like a name on the Hugging Face Hub, else ""."""
    owner, *name = folder.parts
    if len(name) != 1 or owner.startswith((".", "/", "~", "models")) or Path(owner).exists():
        return ""
    return (
        f"; nothing is downloaded: hf download {folder} --local-dir models/{name[0]}, "
        f"then model.path = models/{name[0]}"
    )
