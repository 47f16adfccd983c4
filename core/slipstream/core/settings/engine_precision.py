"""Rules of element types: of the wire, and of engines in FP8, linear layers, KV cache or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.lora_section import LoraSection
from slipstream.core.settings.sections import (
    LearnerSection,
    ModelSection,
    RolloutServerSection,
)
from slipstream.core.settings.weights_section import WeightsSection


def computes_in_fp8(server: RolloutServerSection) -> bool:
    """Whether engines sample with other probabilities than the learner's, for FP8."""
    cache = str(server.engine.get("kv_cache_dtype", "auto")).lower()
    return server.quantization != "off" or cache.startswith("fp8")


def precision_problems(
    server: RolloutServerSection,
    *,
    model: ModelSection,
    learner: LearnerSection,
    lora: LoraSection,
    weights: WeightsSection,
    algorithms: Iterable[AlgorithmSection],
) -> Iterator[str]:
    """Yields one line for each setting that does not go with the model's type or engines in FP8."""
    halves = {model.dtype, weights.wire_dtype or model.dtype} - {"float32"}
    if len(halves) > 1:
        yield (
            "weights.wire_dtype must be model.dtype or float32: what bfloat16 and float16 do not "
            f"share would be lost, got {weights.wire_dtype!r} and {model.dtype!r}"
        )
    if learner.rounding == "stochastic":
        if model.dtype != "bfloat16":
            yield (
                "learner.rounding = 'stochastic' needs model.dtype = 'bfloat16', "
                f"got {model.dtype!r}"
            )
        if learner.optimizer.get("use_precision_aware_optimizer"):
            yield (
                "learner.rounding = 'stochastic' excludes "
                "learner.optimizer.use_precision_aware_optimizer, which makes weights itself"
            )
    if computes_in_fp8(server) and not all(map(_corrects, algorithms)):
        yield (
            "engines in FP8 sample with other probabilities than the learner's: "
            "algorithm.correction.weight must be token or sequence, or a band be set, got 'none'"
        )
    if server.quantization == "off":
        return
    start = f"rollout_server.quantization = {server.quantization!r} needs "
    if model.dtype != "bfloat16":
        yield f"{start}model.dtype = 'bfloat16', got {model.dtype!r}"
    if lora.publishes_adapters:
        yield f"{start}lora.publish = 'merged', got {lora.publish!r}"
    if weights.delta != "off" and server.tensor_parallel_size > 1:
        yield (
            f"{start}weights.delta = 'off' or rollout_server.tensor_parallel_size = 1: scales are "
            f"taken of whole rows, got {weights.delta!r} and {server.tensor_parallel_size}"
        )


def _corrects(algorithm: AlgorithmSection) -> bool:
    """Whether the loss knows that another policy sampled a token of lag 0."""
    correction = algorithm.correction
    masks = correction.token_band is not None or correction.sequence_band is not None
    return algorithm.ratio == "behavior" or correction.weight != "none" or masks
