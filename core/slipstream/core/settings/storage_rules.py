"""The rules on weights that travel through storage."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.core.settings.lora_section import LoraSection
from slipstream.core.settings.sections import RolloutServerSection
from slipstream.core.settings.weights_section import WeightsSection


def storage_problems(
    server: RolloutServerSection, weights: WeightsSection, lora: LoraSection
) -> Iterator[str]:
    """Yields one line for each setting that excludes storage."""
    if server.weights_from == "storage" and weights.storage_url is None:
        yield 'rollout_server.weights_from = "storage" needs weights.storage_url'
    if weights.storage_url is not None and lora.publishes_adapters:
        yield (
            'lora.publish must be "merged" with weights.storage_url: versions in storage are '
            'whole models, got "adapters"'
        )
