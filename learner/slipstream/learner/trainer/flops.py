"""How much arithmetic training a model takes: pure functions of the sizes in its config.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

# Dense bfloat16 TFLOP/s of one device, from NVIDIA's data sheets.
PEAK_TFLOPS = {"A100": 312.0, "H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "B200": 2250.0}
# Versions with other clocks and the same names before it.
OTHER_VERSIONS = "NVL"


@dataclass(frozen=True)
class ModelSizes:
    """What counts for the arithmetic of one token.

    `matrix_parameters` are those that a token is multiplied with: of experts only the chosen ones,
    the output projection (tied or not), neither embedding nor norms. `attention_width` is heads
    times their size, summed over the layers.
    """

    matrix_parameters: int
    attention_width: int

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose attention takes as much as its matrix products."""
        return self.matrix_parameters / self.attention_width


def model_sizes(config: Mapping[str, JsonValue]) -> ModelSizes:
    """The sizes of a decoder with gated MLPs, dense or a mixture of experts (Llama, Qwen, Mixtral).

    `config` is the model's config.json; KeyError names what it lacks.
    """
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    head_dim = _number(config, "head_dim", hidden // heads)
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    num_sparse = sum(_is_sparse(config, layer) for layer in range(layers))
    num_dense = layers - num_sparse
    matrices = layers * attention + hidden * _number(config, "vocab_size")
    if num_dense:
        matrices += num_dense * 3 * hidden * _number(config, "intermediate_size")
    if num_sparse:
        matrices += num_sparse * _active_experts(config, hidden)
    return ModelSizes(matrices, layers * heads * head_dim)


def training_flops(sizes: ModelSizes, lengths: Iterable[int]) -> float:
    """Floating-point operations of one forward and backward pass over sequences of these lengths.

    6 for each parameter and token, and 6 L^2 for the causal attention of a sequence of L tokens
    over `attention_width`: scores and values take 2 L^2 each, half of it lies above the diagonal,
    and the way back costs twice the way there. What recomputation adds is not counted, as model
    FLOPs are defined in PaLM (arXiv:2204.02311, appendix B).
    """
    tokens, squares = 0, 0
    for length in lengths:
        tokens += length
        squares += length * length
    return 6.0 * sizes.matrix_parameters * tokens + 6.0 * sizes.attention_width * squares


def peak_tflops(device_name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a device that torch calls so; None when it is not known here."""
    if OTHER_VERSIONS in device_name:
        return None
    names = sorted(PEAK_TFLOPS, key=len, reverse=True)
    known = (name for name in names if re.search(rf"\b{name}\b", device_name))
    name = next(known, None)
    return None if name is None else PEAK_TFLOPS[name]


def _is_sparse(config: Mapping[str, JsonValue], layer: int) -> bool:
    if not _num_experts(config):
        return False
    dense = config.get("mlp_only_layers") or []
    assert isinstance(dense, list)
    every = _number(config, "decoder_sparse_step", 1)
    return layer not in dense and (layer + 1) % every == 0


def _active_experts(config: Mapping[str, JsonValue], hidden: int) -> int:
    intermediate = _number(config, "moe_intermediate_size", _number(config, "intermediate_size", 0))
    shared = _number(config, "shared_expert_intermediate_size", 0)
    chosen = _number(config, "num_experts_per_tok")
    router = hidden * _num_experts(config)
    return router + 3 * hidden * (chosen * intermediate + shared)


def _num_experts(config: Mapping[str, JsonValue]) -> int:
    return _number(config, "num_experts", 0) or _number(config, "num_local_experts", 0)


def _number(config: Mapping[str, JsonValue], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise KeyError(f"the model's config.json has no number {key}")
    return value
