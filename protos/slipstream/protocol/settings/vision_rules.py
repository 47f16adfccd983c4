"""Rules for models that see images: pure functions that yield one line for each broken rule."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.model_sizes import ModelSizes


def vision_problems(config: Config, sizes: ModelSizes) -> Iterator[str]:
    """Checks a model and the images of its episodes."""
    if not sizes.has_vision:
        if config.sampling.max_images:
            yield (
                f"sampling.max_images must be 0 for a {sizes.architecture}, which sees no images, "
                f"got {config.sampling.max_images}"
            )
        return
    learner = config.learner
    if learner.parallel.cp > 1:
        yield (
            f"learner.parallel.cp must be 1 for a {sizes.architecture}: chunks of a sequence would "
            f"cut its images, got {learner.parallel.cp}"
        )
    if config.lora.rank:
        yield (
            f"lora.rank must be 0 for a {sizes.architecture}: matrices of the vision tower have "
            f"the names of the decoder's, got {config.lora.rank}"
        )
    if config.critic is not None:
        yield f"[critic] is not supported for a {sizes.architecture}"
    if config.algorithm.router_replay != "off":
        yield (
            f'algorithm.router_replay must be "off" for a {sizes.architecture}: it was not tested '
            f"with images, got {config.algorithm.router_replay!r}"
        )
    server, reference = config.rollout_server, config.reference
    for setting, value in (("drafts", server.drafts), ("quantization", server.quantization)):
        if value != "off":
            yield (
                f'rollout_server.{setting} must be "off" for a {sizes.architecture}: it was not '
                f"tested with images, got {value!r}"
            )
    if reference is not None and reference.server is not None:
        yield f"reference.server gets no images: a {sizes.architecture} needs reference.path"
    if sizes.deep_layers and learner.recompute == "auto":
        yield (
            f'learner.recompute must be "off" for a {sizes.architecture}: features of images are '
            "added between its layers, got 'auto'"
        )
    if sizes.deep_layers and learner.transformer.get("recompute_granularity") == "full":
        yield (
            "learner.transformer.recompute_granularity must be selective or left out for a "
            f"{sizes.architecture}: features of images are added between its layers, got 'full'"
        )
