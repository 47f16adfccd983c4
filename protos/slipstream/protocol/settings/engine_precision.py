"""Rules of a run whose engines compute in FP8: linear layers, the KV cache, or both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.protocol.settings.config import Config


def computes_in_fp8(config: Config) -> bool:
    """Whether engines sample with other probabilities than the learner's, for FP8."""
    server = config.rollout_server
    cache = str(server.engine.get("kv_cache_dtype", "auto")).lower()
    return server.quantization != "off" or cache.startswith("fp8")


def precision_problems(config: Config) -> Iterator[str]:
    """Yields one line for each setting that does not go with engines in FP8."""
    if computes_in_fp8(config):
        for each in config.algorithms.distinct:
            correction = each.correction
            masks = correction.token_band is not None or correction.sequence_band is not None
            if each.ratio == "proximal" and correction.weight == "none" and not masks:
                yield (
                    "engines in FP8 sample with other probabilities than the learner's: "
                    "algorithm.correction.weight must be token or sequence, or a band be set, "
                    "got 'none'"
                )
    quantization = config.rollout_server.quantization
    if quantization == "off":
        return
    start = f"rollout_server.quantization = {quantization!r} needs "
    if config.model.dtype != "bfloat16":
        yield f"{start}model.dtype = 'bfloat16', got {config.model.dtype!r}"
    if config.lora.publishes_adapters:
        yield f"{start}lora.publish = 'merged', got {config.lora.publish!r}"
    if config.weights.delta != "off":
        yield (
            f"{start}weights.delta = 'off': changes are put on bfloat16 weights, which engines "
            f"do not keep, got {config.weights.delta!r}"
        )
