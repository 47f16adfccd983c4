"""Rules for settings that change between the start of a run and its continuation.

A step that is trained again must equal the recorded step, and its digest must be comparable. Leased
groups keep their tasks, seeds and deadlines. All other settings may change.
"""

from __future__ import annotations

from functools import reduce

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.models.vision_rules import sees_images
from slipstream.core.settings.config import Config

# Setting -> reason why it must not change.
FIXED = {
    "run.seed": "it decides the order of the tasks",
    "model.path": "the weights are those of this model",
    "model.dtype": "the optimizer's state has this precision",
    "algorithm.group_size": "groups of this size are leased",
    "algorithm.groups_per_step": "the deadlines of leased groups count on it",
    "algorithm.mini_batches": "recorded steps have this number",
    "algorithm.epochs": "recorded steps have this number",
    "sampling.temperature": "recorded replies were sampled with it",
    "lora.rank": "checkpoints hold adapters of this rank, or none",
    "lora.alpha": "the weights are made with it",
    "lora.dropout": "recorded steps dropped this share",
    "lora.adapters": "checkpoints hold these adapters",
    "lora.target_modules": "checkpoints hold adapters of these matrices",
    "lora.publish": "recorded digests are of merged weights or of matrices and adapters",
    "checkpoint.load": "the run began with these weights",
}
# Setting -> reason why it may only grow.
GROWING = {
    "run.steps": "steps up to the old last one may be recorded",
    "algorithm.max_staleness": "recorded batches may have lags up to the old bound",
}


def check_resumable(before: Config, now: Config) -> None:
    """Raises ConfigError for the first setting with a change that is not allowed."""
    for key, reason in FIXED.items():
        old, new = _value(before, key), _value(now, key)
        if old != new:
            raise ConfigError(
                f"{key} must stay {old} when a run goes on, got {new}: {reason}; "
                "choose another run.name for a new run"
            )
    wanted = _stored_models(now)
    for key, was_stored in _stored_models(before).items():
        if was_stored != wanted[key]:
            change, held = ("left out", "that") if was_stored else ("added", "no such")
            raise ConfigError(
                f"{key} cannot be {change} when a run goes on: its checkpoints hold {held} model; "
                "choose another run.name for a new run"
            )
    if bool(before.sampling.max_images) != bool(now.sampling.max_images):
        sizes = read_model_sizes(now.model.path)
        if sees_images(before, sizes) != sees_images(now, sizes):
            old, new = before.sampling.max_images, now.sampling.max_images
            raise ConfigError(
                f"sampling.max_images must stay {'above 0' if old else '0'} when a run goes on, "
                f"got {new}: its checkpoints hold the model {'with' if old else 'without'} its "
                "vision tower; choose another run.name for a new run"
            )
    was_asked, is_asked = _likely_tokens(before), _likely_tokens(now)
    if was_asked != is_asked:
        raise ConfigError(
            f"reference.top_k must stay {was_asked} when a run goes on, got {is_asked}: "
            "recorded replies carry this number of likely tokens; choose another run.name for a "
            "new run"
        )
    adapters = _adapters(now)
    for name, adapter in _adapters(before).items():
        if adapters.get(name, adapter) != adapter:
            raise ConfigError(
                f"adapter of {name} must stay {adapter!r} when a run goes on, got "
                f"{adapters[name]!r}: its leased groups are sampled with it; choose another "
                "run.name for a new run"
            )
    for key, reason in GROWING.items():
        old, new = _value(before, key), _value(now, key)
        assert isinstance(old, int)
        assert isinstance(new, int)
        if new < old:
            raise ConfigError(
                f"{key} must be at least {old} when a run goes on, got {new}: {reason}"
            )


def _stored_models(config: Config) -> dict[str, bool]:
    """Returns for each setting whether it makes checkpoints hold a model."""
    reference = config.reference
    is_refreshed = reference is not None and reference.refresh_every_steps > 0
    return {"critic": config.critic is not None, "reference.refresh_every_steps": is_refreshed}


def _adapters(config: Config) -> dict[str, str | None]:
    """Returns the adapter of each environment and evaluation by its name."""
    trained = {section.name: section.adapter for section in config.environments}
    return trained | {section.name: section.adapter for section in config.evaluations}


def _likely_tokens(config: Config) -> int | None:
    """The number of likely tokens that a server gives for the reference; None without a server."""
    reference = config.reference
    return reference.top_k if reference is not None and reference.server else None


def _value(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)
