"""The learner computes with the engine's bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension, Need

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables

SPLIT = "the parts of a split product are added up in another order"


def _is_on(config: Tables) -> bool:
    return config.algorithm.agreement == "bits"


EXTENSION = Extension(
    name="engine_bits",
    is_on=_is_on,
    title="algorithm.agreement = 'bits'",
    needs=(
        Need("learner.parallel.tp", only=1, because=SPLIT),
        Need("learner.parallel.cp", only=1, because="attention would be split by keys"),
        Need("rollout_server.tensor_parallel_size", only=1, because=SPLIT),
        Need(
            "rollout_server.pipeline_parallel_size",
            only=1,
            because="bits of stages were not compared",
        ),
        Need(
            "rollout_server.quantization",
            only="off",
            because="it computes with other kernels than the learner's",
        ),
        Need("lora.rank", only=0, because="merged and separate adapters round differently"),
        Need("sampling.max_images", only=0, because="the tower has kernels of its own"),
        Need(
            "sampling.temperature",
            only=1.0,
            because="the engine divides logits in a kernel of its own",
        ),
        Need(
            "rollout_server.recompute_context",
            only=True,
            because="else replies go on with keys and values of older weights",
        ),
    ),
    rules="slipstream.extensions.engine_bits.settings:problems",
    model="slipstream.extensions.engine_bits.trainer:BitsPart",
    layers="slipstream.extensions.engine_bits.trainer:layer_parts",
    engine_arguments="slipstream.extensions.engine_bits.arguments:engine_arguments",
)
