"""The settings that do not go with a client's own loop."""

from collections.abc import Iterator

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    learner = config.learner
    unfit: dict[str, object] = {
        "environments": [section.name for section in config.environments],
        "evaluations": [section.name for section in config.evaluations],
        "critic": config.critic,
        "reference": config.reference,
        "weights.storage_url": config.weights.storage_url,
        "model.dtype = float16": config.model.dtype == "float16",
        "learner.offload.gradients": learner.offload.gradients,
        "learner.shared_prefix_tokens": learner.shared_prefix_tokens,
    }
    for name, value in unfit.items():
        if value:
            yield f"controller.client_loop needs no {name}, got {value!r}"
