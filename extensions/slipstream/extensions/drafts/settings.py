"""The table `drafts`, and the settings that do not go with the layer that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field
from slipstream.core.settings.section import Section

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


class DraftsSection(Section):
    """A layer that drafts on the rollout servers, and is trained beside the policy.

    The table switches it on, an empty one with the values below. Replies stay those of the policy
    alone. But for short trials a server drafts only where it has measured that this is faster.
    """

    # Tokens of a draft.
    tokens: int = Field(3, ge=1, le=8)
    # Learning rate of the layer.
    learning_rate: float = Field(5e-4, gt=0)
    # Most tokens of a step, prompts among them, from which the layer learns on each replica of the
    # policy.
    trained_tokens: int = Field(16384, ge=256)


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
    fp8 = config.learner.fp8
    if fp8 != "off":
        yield (
            f"learner.fp8 = {fp8!r} needs no table drafts, since a layer that drafts was not tried "
            "in it"
        )
