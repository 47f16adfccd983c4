"""Sizes from a model's config.json, on which the parallel layout depends."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slipstream.core.errors import ConfigError
from slipstream.core.models.families import FAMILIES, Family, architecture_of, family_of
from slipstream.core.models.model_fields import has_tied_output, rope_table
from slipstream.core.types import expert_dtype

# Fields with the heads of delta nets.
_LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. A size is 0 if config.json lacks its field."""

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
    # Intermediate size of the expert that every token goes to; 0 if there is none.
    shared_expert_ffn: int
    # Whether the weights of a token's experts add up to 1.
    normalizes_experts: bool
    # Whether layers with and without experts alternate in a mixture of experts.
    has_dense_layers: bool
    # Number of layers without experts, the first ones.
    dense_layers: int
    # Latent attention: size of a token's vector for keys and values with the positions' part, and
    # size of its vector for queries; 0 without latent attention.
    latent_size: int
    query_latent_size: int
    # Heads of keys and of values of delta nets; () without such layers.
    linear_heads: tuple[int, ...]
    norm_eps: float
    has_tied_output: bool
    rope_type: str
    # All settings of the rotary embedding by their names.
    rope: tuple[tuple[str, Any], ...]
    uses_sliding_window: bool
    is_quantized: bool
    # Whether it can be trained on images.
    has_vision: bool
    # Number of layers behind which the tower adds features.
    deep_layers: int
    # The token that stands for features of an image, as config.json says it; None without vision.
    image_token: Any

    def cache_bytes_per_token(self, item_bytes: int, tp: int, *, stages: int = 1) -> int:
        """Returns a token's KV cache bytes on one of `tp` workers; an element has `item_bytes`.

        Of an engine's `stages` it is the one with most layers.
        """
        layers = -(-self.layers // stages)
        if self.latent_size:
            # Every worker holds all of it.
            return layers * self.latent_size * item_bytes
        return 2 * layers * max(1, self.kv_heads // tp) * self.head_dim * item_bytes

    def stage_share(self, stages: int) -> float:
        """Returns the largest share of `parameters` that one of an engine's `stages` may have.

        That stage has a layer more than others where they do not divide, and the embedding or the
        head, of which both ends have one.
        """
        if stages == 1:
            return 1.0
        vocab = self.hidden * self.vocab
        in_layers = self.parameters - vocab * (1 if self.has_tied_output else 2)
        of_stage = in_layers * -(-self.layers // stages) / max(1, self.layers) + vocab
        return of_stage / self.parameters

    @property
    def routing_bytes_per_token(self) -> int:
        """The size of one token's expert ids on the wire, in bytes."""
        return self.layers * self.experts_per_token * expert_dtype(self.experts).itemsize

    @property
    def parameters(self) -> int:
        """The approximate number of parameters, without biases, norms and vision towers."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        experts = self.experts * self.expert_ffn + self.shared_expert_ffn
        dense = self.dense_layers if self.experts else self.layers
        mlps = 3 * (dense * self.ffn + (self.layers - dense) * experts)
        vocab = self.vocab * (1 if self.has_tied_output else 2)
        return self.hidden * (vocab + self.layers * heads + mlps)

    @property
    def expert_parameters(self) -> int:
        """The approximate number of parameters of the experts to which tokens are routed."""
        return 3 * self.hidden * (self.layers - self.dense_layers) * self.experts * self.expert_ffn

    @property
    def active_parameters(self) -> int:
        """The approximate number of parameters that one token is multiplied by."""
        embedding = 0 if self.has_tied_output else self.hidden * self.vocab
        unused = self.experts - self.experts_per_token
        idle = self.expert_parameters * unused // self.experts if self.experts else 0
        return self.parameters - embedding - idle

    @property
    def layer_parameters(self) -> int:
        """The approximate number of a layer's parameters that one token passes through."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        experts = self.experts_per_token * self.expert_ffn + self.shared_expert_ffn
        return self.hidden * (heads + 3 * (experts if self.experts else self.ffn))

    @property
    def family(self) -> Family:
        """The record of the model's class, or a plain decoder's record for an unknown class."""
        return FAMILIES.get(self.architecture, Family())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Returns the sizes in the table of a config.json, as transformers 4 or 5 writes it."""

        def number(*names: str) -> int:
            stated = next((values[name] for name in names if isinstance(values.get(name), int)), 0)
            return int(stated)

        rope = rope_table(values)
        heads = number("num_attention_heads")
        layers = number("num_hidden_layers")
        experts = number("num_experts", "num_local_experts", "n_routed_experts")
        latent = number("kv_lora_rank")
        # vLLM does not scale queries beyond these positions, as transformers does.
        is_limited = rope.get("llama_4_scaling_beta")
        limit = "original_max_position_embeddings" if is_limited else "max_position_embeddings"
        limits = rope if is_limited else values
        vision = family_of(values).vision
        tower = values.get("vision_config") or {}
        deep_layers = () if vision is None else vision.deep_layers
        return cls(
            architecture=architecture_of(values),
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
            latent_size=latent and latent + number("qk_rope_head_dim"),
            query_latent_size=number("q_lora_rank"),
            linear_heads=tuple(filter(None, map(number, _LINEAR_HEADS))),
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
            has_vision=vision is not None,
            deep_layers=len(tower.get("deepstack_visual_indexes", deep_layers) or ()),
            image_token=vision and values.get("image_token_id", vision.image_token),
        )


def normalizes_experts(values: Mapping[str, Any]) -> bool:
    """Whether the routing weights of a token's experts are normalised to a sum of 1."""
    experts = family_of(values).experts
    return bool(values.get("norm_topk_prob", experts is not None and experts.is_normalized))


def read_model_sizes(folder: Path) -> ModelSizes:
    """Returns the sizes of a Hugging Face folder. Raises ConfigError like `read_model_table`."""
    return ModelSizes.of(read_model_table(folder))


# The address of a model's page, in which a path has one slash of two.
_HUB_ADDRESS = re.compile(r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)")


def read_model_table(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a Hugging Face folder, with the decoder's fields at the top level.

    Raises ConfigError if the file cannot be read or its class of model is not supported.
    """
    path = folder / "config.json"
    if folder.is_file():
        raise ConfigError(
            f"model.path must be a Hugging Face folder, got the file {folder}: name its folder, "
            f"{folder.parent}"
        )
    if not folder.is_dir():
        if address := _HUB_ADDRESS.match(str(folder)):
            raise ConfigError(
                f"model.path names a model of the hub without its address: {address[1]}, "
                f"got {folder}"
            )
        # Relative paths: a run is exported or replayed in the folder in which it was started.
        here = "" if folder.is_absolute() else f" below {Path.cwd()}"
        raise ConfigError(
            f"model.path must be a Hugging Face folder, got {folder}, which does not exist{here}"
        )
    if not path.is_file():
        raise ConfigError(
            f"model.path must be a Hugging Face folder, but {folder} has no config.json"
        )
    values = read_table(path)
    vision = family_of(values).vision
    decoder = values.get("text_config") or {}
    outer, inner = (bool(table.get("tie_word_embeddings")) for table in (values, decoder))
    if vision is not None and vision.ties == "same" and outer != inner:
        raise ConfigError(
            f"model.path: tie_word_embeddings is {str(outer).lower()} in config.json and "
            f"{str(inner).lower()} in its text_config: transformers reads the first and rollout "
            "servers the second"
        )
    if family_of(values).decoder_folder and values.get("tie_word_embeddings") is not inner:
        raise ConfigError(
            f"model.path: config.json must say tie_word_embeddings {str(inner).lower()} beside its "
            "text_config, as that does: transformers reads the outer field alone, got "
            f"{values.get('tie_word_embeddings')!r}"
        )
    return decoder_table(values)


def read_table(path: Path) -> dict[str, Any]:
    """Returns the table in a JSON file; raises ConfigError if it cannot be read or holds none."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} must hold a table, got a {type(table).__name__}")
    return table


def decoder_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the decoder's fields, nested in vision models, at the top level.

    Raises ConfigError for a text class whose config.json describes a vision tower.
    """
    architecture = architecture_of(values)
    if architecture.endswith("ForCausalLM") and values.get("vision_config"):
        raise ConfigError(
            f"model.path: config.json of a {architecture} must have no vision_config: it is "
            "trained without a vision tower, which would be left out"
        )
    decoder = values.get("text_config")
    if not isinstance(decoder, Mapping):
        return dict(values)
    outer = {name: value for name, value in values.items() if name != "text_config"}
    vision = family_of(values).vision
    if vision is not None:
        # transformers takes the outer field or its default, false; for some families both count.
        is_tied = outer.get("tie_word_embeddings") or (
            vision.ties == "either" and decoder.get("tie_word_embeddings")
        )
        outer["tie_word_embeddings"] = bool(is_tied)
    return {**decoder, **outer}
