"""The settings that do not go with the layer that drafts."""

from collections.abc import Iterator

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    if config.rollout_server.drafts:
        yield "drafts excludes rollout_server.engine.speculative_config, which drafts otherwise"
    unfit = {
        "learner.parallel.pp = 1, so that one rank has embeddings and output": (
            config.learner.parallel.pp > 1
        ),
        "lora.rank = 0: adapters are published without other weights": config.lora.rank > 0,
        "sampling.max_images = 0: vLLM's drafts see no images": config.sampling.max_images > 0,
        "controller.client_loop = false: it is trained by groups": config.controller.client_loop,
    }
    for need, is_unfit in unfit.items():
        if is_unfit:
            yield f"drafts needs {need}"
