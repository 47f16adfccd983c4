"""The FLOPs of training a model, from the sizes in its config.json: pure functions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

# Dense bfloat16 TFLOP/s of one device, from NVIDIA's data sheets.
PEAK_TFLOPS = {"A100": 312.0, "H100 PCIe": 756.0, "H100": 989.4, "H200": 989.4, "B200": 2250.0}
# Word in the names of GPU versions with other clocks.
OTHER_VERSIONS = "NVL"


@dataclass(frozen=True)
class ArithmeticSizes:
    """The sizes of a model that determine its FLOPs per token.

    `matrix_parameters` counts the matrix weights that a token is multiplied by: active experts and
    the output projection (tied or not), but no embedding or norms. `attention_width` is the number
    of heads times the head size, summed over the layers; the head size is the mean for keys and
    values.
    """

    matrix_parameters: int
    attention_width: int

    @property
    def attention_length(self) -> float:
        """The sequence length at which attention takes as many FLOPs as the matrix products."""
        return self.matrix_parameters / max(1, self.attention_width)


def model_sizes(config: Mapping[str, JsonValue]) -> ArithmeticSizes:
    """Returns the sizes of a decoder with gated MLPs, dense or with experts.

    `config` is the model's config.json. Raises KeyError with the name of a missing field. Layers
    with attention windows are counted like the others.
    """
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    attention, width = _attention(config, hidden)
    num_sparse = sum(_is_sparse(config, layer) for layer in range(layers))
    num_dense = layers - num_sparse
    matrices = layers * attention + hidden * _number(config, "vocab_size")
    if num_dense:
        matrices += num_dense * 3 * hidden * _number(config, "intermediate_size")
    if num_sparse:
        matrices += num_sparse * _active_experts(config, hidden)
    return ArithmeticSizes(matrices, layers * width)


def _attention(config: Mapping[str, JsonValue], hidden: int) -> tuple[int, int]:
    """Returns the parameters and the attention width of one layer's attention."""
    heads = _number(config, "num_attention_heads")
    latent = _number(config, "kv_lora_rank", 0)
    if not latent:
        kv_heads = _number(config, "num_key_value_heads", heads)
        head_dim = _number(config, "head_dim", hidden // heads)
        return 2 * hidden * (heads + kv_heads) * head_dim, heads * head_dim
    plain, turned, value = (
        _number(config, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v")
    )
    queries, rows = _number(config, "q_lora_rank", 0), heads * (plain + turned)
    matrices = queries * (hidden + rows) if queries else hidden * rows
    matrices += hidden * (latent + turned) + latent * heads * (plain + value)
    # Scores take queries and keys of another size than values.
    return matrices + heads * value * hidden, (rows + heads * value) // 2


def training_flops(
    sizes: ArithmeticSizes, lengths: Iterable[int], *, saved: tuple[int, int] = (0, 0)
) -> float:
    """Returns the FLOPs of one forward and backward pass over sequences of these lengths.

    Each matrix parameter takes 6 for each token. The causal attention of a sequence of L tokens
    takes 6 L^2 times `attention_width`: scores and values take 2 L^2 each, the mask removes half of
    this, and the backward pass costs twice the forward pass. Recomputation is not counted, as in
    the definition of model FLOPs in PaLM (arXiv:2204.02311, appendix B). `saved` has the tokens and
    the sum of L^2 that shared prefixes save; both are subtracted.
    """
    tokens, squares = -saved[0], -saved[1]
    for length in lengths:
        tokens += length
        squares += length * length
    return 6.0 * sizes.matrix_parameters * tokens + 6.0 * sizes.attention_width * squares


def peak_tflops(device_name: str) -> float | None:
    """Returns a device's dense bfloat16 TFLOP/s, or None if not known.

    `device_name` is torch's name of the device.
    """
    if OTHER_VERSIONS in device_name:
        return None
    names = sorted(PEAK_TFLOPS, key=len, reverse=True)
    known = (PEAK_TFLOPS[name] for name in names if re.search(rf"\b{name}\b", device_name))
    return next(known, None)


def _is_sparse(config: Mapping[str, JsonValue], layer: int) -> bool:
    if not _num_experts(config) or layer < _number(config, "first_k_dense_replace", 0):
        return False
    dense = config.get("mlp_only_layers") or []
    assert isinstance(dense, list)
    every = _number(config, "decoder_sparse_step", 1)
    return layer not in dense and (layer + 1) % every == 0


def _active_experts(config: Mapping[str, JsonValue], hidden: int) -> int:
    intermediate = _number(config, "moe_intermediate_size", _number(config, "intermediate_size", 0))
    shared = _number(config, "shared_expert_intermediate_size", 0)
    for name in ("n_shared_experts", "num_shared_experts"):
        shared += _number(config, name, 0) * intermediate
    chosen = _number(config, "num_experts_per_tok")
    router = hidden * _num_experts(config)
    return router + 3 * hidden * (chosen * intermediate + shared)


def _num_experts(config: Mapping[str, JsonValue]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((found for name in names if (found := _number(config, name, 0))), 0)


def _number(config: Mapping[str, JsonValue], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int):
        raise KeyError(f"the model's config.json has no number {key}")
    return value
