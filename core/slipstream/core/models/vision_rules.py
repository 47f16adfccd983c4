"""Rules for models that see images: pure functions that yield one line for each broken rule."""

from collections.abc import Iterator

from slipstream.core.models.family import refusals
from slipstream.core.models.model_sizes import ModelSizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.sections import LearnerSection

# vLLM hard-codes this epsilon in the norm of Mistral 3's projector.
PROJECTOR_EPS = 1e-5


def sees_images(config: Config, sizes: ModelSizes) -> bool:
    """Whether a model of these sizes has its vision tower in a run."""
    return sizes.has_vision and (not sizes.is_nested or config.sampling.max_images > 0)


def vision_problems(config: Config, sizes: ModelSizes) -> Iterator[str]:
    """Checks a model and the images of its episodes."""
    if sizes.is_nested and not sees_images(config, sizes):
        yield from _nested_problems(config, sizes)
        return
    if not sizes.has_vision:
        if config.sampling.max_images:
            yield (
                f"sampling.max_images must be 0 for a {sizes.folder_class}, which sees no images, "
                f"got {config.sampling.max_images}"
            )
        return
    if sizes.is_nested:
        if sizes.norm_eps != PROJECTOR_EPS:
            yield (
                f"model.path: rms_norm_eps of a {sizes.folder_class} that sees images must be "
                f"{PROJECTOR_EPS}, with which rollout servers norm the features, got "
                f"{sizes.norm_eps}"
            )
        yield from _untested_problems(config, sizes)
    token, vocab = sizes.image_token, sizes.vocab
    if not isinstance(token, int) or token < 0 or token >= vocab > 0:
        name = "image_token_index" if sizes.is_nested else "image_token_id"
        yield (
            f"model.path: {name} of a {sizes.folder_class} must be a token of the vocabulary, "
            f"0 to {vocab - 1}, got {token!r}"
        )
    yield from vision_layout_problems(config.learner, sizes)
    server, reference = config.rollout_server, config.reference
    has_images = config.sampling.max_images > 0
    if server.drafts != "off" and has_images:
        yield (
            f'rollout_server.drafts must be "off" for a {sizes.folder_class} with images: it was '
            f"not tested, got {server.drafts!r}"
        )
    if server.quantization != "off" and (has_images or sizes.experts):
        kind = "images" if has_images else "experts beside a vision tower"
        yield (
            f'rollout_server.quantization must be "off" for a {sizes.folder_class} with {kind}: it '
            f"was not tested, got {server.quantization!r}"
        )
    if reference is not None and reference.server is not None:
        yield f"reference.server gets no images: a {sizes.folder_class} needs reference.path"


def vision_layout_problems(learner: LearnerSection, sizes: ModelSizes) -> Iterator[str]:
    """Checks the layout of a model with vision, the policy or one beside it."""
    if learner.parallel.cp > 1:
        yield (
            f"learner.parallel.cp must be 1 for a {sizes.folder_class}: chunks of a sequence would "
            f"cut its images, got {learner.parallel.cp}"
        )
    if sizes.deep_layers and learner.recompute == "auto":
        yield (
            f'learner.recompute must be "off" for a {sizes.folder_class}: features of images are '
            "added between its layers, got 'auto'"
        )
    if sizes.deep_layers and learner.transformer.get("recompute_granularity") == "full":
        yield (
            "learner.transformer.recompute_granularity must be selective or left out for a "
            f"{sizes.folder_class}: features of images are added between its layers, got 'full'"
        )


def _nested_problems(config: Config, sizes: ModelSizes) -> Iterator[str]:
    """Checks a run whose model has a vision tower that is left out."""
    chosen = {"sampling.max_images": config.sampling.max_images}
    yield from refusals(sizes.family, sizes.folder_class, chosen)
    yield from _untested_problems(config, sizes)
    for setting in ("drafts", "quantization"):
        value = getattr(config.rollout_server, setting)
        if value != "off":
            yield (
                f'rollout_server.{setting} must be "off" for a {sizes.folder_class} with a vision '
                f"tower: it was not tested, got {value!r}"
            )


def _untested_problems(config: Config, sizes: ModelSizes) -> Iterator[str]:
    if config.lora.rank:
        yield (
            f"lora.rank must be 0 for a {sizes.folder_class} with a vision tower: the names of "
            f"its adapters were not compared, got {config.lora.rank}"
        )
    if config.critic is not None:
        yield from critic_problems(sizes)


def critic_problems(sizes: ModelSizes) -> Iterator[str]:
    """Checks the sizes of a critic."""
    if sizes.is_nested:
        yield f"[critic] is not supported for a {sizes.folder_class} with a vision tower"
