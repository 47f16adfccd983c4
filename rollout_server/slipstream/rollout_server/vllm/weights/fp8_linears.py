"""The linear layers that vLLM quantises to FP8 when it loads them, and how it does so.

vLLM keeps such a layer's matrix transposed in float8, with a scale for each of its rows. No
checkpoint holds that form: a loader needs the matrix as it was before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from slipstream.rollout_server.weights.copy_plan import NotCopied
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import get_fp8_min_max
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

# Elements that are divided at one time: their quotients take four bytes each.
_CHUNK = 16 << 20
# vLLM divides the smallest scale of a row by this (0.32.0).
_SMALLEST = 512


@dataclass(frozen=True)
class Fp8Linear:
    """Room for a quantised matrix [rows, columns] and the scales of its rows [rows, 1]."""

    weight: torch.Tensor
    scale: torch.Tensor
    # The element type before quantising.
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.weight.shape
        return rows, columns

    @property
    def plain_bytes(self) -> int:
        """Size of the matrix before quantising."""
        return self.weight.numel() * self.dtype.itemsize

    def like(self) -> Fp8Linear:
        """Returns other room of the same form."""
        weight = torch.empty(self.shape, dtype=self.weight.dtype, device=self.weight.device)
        return Fp8Linear(weight, torch.empty_like(self.scale), self.dtype)

    def quantise(self, plain: torch.Tensor, largest: torch.Tensor) -> None:
        """Fills the room from `plain` as vLLM's loader does, bit for bit; waits for nothing.

        `largest` [rows, 1] has the greatest absolute value of each row; tensor parallel workers
        take them of whole rows.
        """
        low, high = get_fp8_min_max()
        # A tensor on the device: a number would be multiplied by its reciprocal.
        most = torch.full((), high, dtype=torch.float32, device=plain.device)
        scales = largest.to(torch.float32) / most
        self.scale.copy_(scales.clamp_min(1.0 / (most * _SMALLEST)))
        chunk = max(1, _CHUNK // plain.shape[1])
        for start in range(0, plain.shape[0], chunk):
            rows = slice(start, start + chunk)
            self.weight[rows].copy_((plain[rows] / self.scale[rows]).clamp_(low, high))


def fp8_linears(model: torch.nn.Module) -> dict[str, Fp8Linear]:
    """Maps the name of each weight that is quantised to the engine's live room for it."""
    return {name: _live(name, layer) for name, layer in _layers(model)}


@contextlib.contextmanager
def loadable(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the parameters of `model` as its loader takes them, none of them quantised.

    Quantised weights have plain ones in their place meanwhile, in main memory. Nothing may be
    written to these: no page of them is in use.
    """
    kept = []
    try:
        for name, layer in _layers(model):
            kept.append((layer, dict(layer._parameters)))
            with torch.device("cpu"):
                plain = materialize_meta_tensor(_as_loaded(name, layer))
            plain.weight_loader = _own_loader(plain)
            del layer._parameters["weight_scale"]
            layer._parameters["weight"] = plain
        yield dict(model.named_parameters())
    finally:
        for layer, parameters in kept:
            layer._parameters.clear()
            layer._parameters.update(parameters)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        # Wrappers for adapters have the method of their layer too, as a property.
        if type(vars(layer).get("quant_method")) is Fp8PtpcOnlineLinearMethod:
            yield f"{name}.weight", layer


def _as_loaded(name: str, layer: Any) -> Any:  # noqa: ANN401 - vLLM's classes of parameters
    """Returns the weight without memory as vLLM's loader takes it."""
    found = get_layerwise_info(layer).restore_metadata[0].get("weight")
    if found is None or found.dim() != 2:
        raise NotCopied(f"{name} is loaded in another form than as a matrix")
    return restore_layer_refs(found, layer)


def _own_loader(plain: Any) -> Any:  # noqa: ANN401 - a loader of vLLM
    """Returns the loader of a weight without vLLM's collecting of a whole layer around it."""
    loader = plain.weight_loader
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def _live(name: str, layer: Any) -> Fp8Linear:  # noqa: ANN401 - a layer of vLLM
    before = _as_loaded(name, layer)
    rows, columns = before.shape
    weight, scale = layer.weight.data, layer.weight_scale.data
    if weight.dtype != current_platform.fp8_dtype() or weight.stride(0) != 1:
        raise NotCopied(f"{name} is packed for {type(layer.quant_method.fp8_linear).__name__}")
    # vLLM pads both sides of a matrix to multiples of 16; the padding stays as it is.
    return Fp8Linear(weight.t()[:rows, :columns], scale[:rows], before.dtype)
