"""The settings that do not go with weights through storage."""

from collections.abc import Iterator

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    turns = config.controller.turns
    transport = config.weights.transport
    if transport != "auto":
        yield (
            f'weights.transport must be "auto" with weights.storage_url, got {transport!r}: all '
            "servers of a run fetch their weights from storage, or the trainer sends to all"
        )
    if turns in ("pause", "sleep"):
        yield (
            'controller.turns must be "auto" or "off" with weights.storage_url, got '
            f"{turns!r}: servers load weights while the learner trains"
        )
    if config.lora.publishes_adapters:
        yield (
            'lora.publish must be "merged" with weights.storage_url: versions in storage are '
            'whole models, got "adapters"'
        )
