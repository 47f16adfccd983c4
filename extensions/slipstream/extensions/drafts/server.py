"""The engine's part of drafts: vLLM's arguments for the layer, and its weights in an update."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.extensions.drafts.extension import PREFIX
from slipstream.extensions.drafts.settings import DraftsSection
from slipstream.extensions.drafts.shape import DraftShape

Named = tuple[str, torch.Tensor]


def draft_arguments(config: Config, folder: Path) -> dict[str, object]:
    """Returns vLLM's arguments by which it drafts with a layer, whose values a publish brings."""
    drafts = config.top_table("drafts", DraftsSection)
    assert drafts is not None
    tokens = drafts.tokens
    max_episodes = config.rollout_server.max_episodes
    lengths = [[1, max(1, max_episodes - 1), tokens], [max_episodes, max_episodes, 0]]
    model = folder / "draft"
    DraftShape.of(read_model_sizes(config.model.path)).write_folder(model, config.model.dtype)
    return {
        "speculative_config": {
            "method": "eagle",
            "model": str(model),
            "num_speculative_tokens": tokens,
            # A drafted token is kept with probability min(1, p / q), or else with p alone.
            "draft_sample_method": "probabilistic",
            "draft_load_config": {"load_format": "dummy"},
            # vLLM captures graphs for both lengths; `MeasuredDraftSwitch` chooses between them.
            "num_speculative_tokens_per_batch_size": lengths if max_episodes > 1 else lengths[:1],
        }
    }


def engine_arguments(config: Config, folder: Path | None, *, on_cpu: bool) -> dict[str, object]:
    """Returns vLLM's arguments; makes the layer's folder in `folder`."""
    assert folder is not None, "the layer that drafts needs a folder"
    return draft_arguments(config, folder)


class WithDrafts(torch.nn.Module):
    """The engine's model and the layer that drafts, loaded as one model; it computes nothing."""

    def __init__(
        self,
        model: torch.nn.Module,
        runner: Any,  # noqa: ANN401 - vLLM's
        load: Callable[[torch.nn.Module, Iterable[Named]], set[str] | None],
    ) -> None:
        """Takes the layer from vLLM's model `runner`; raises WeightSyncError if it has none.

        `load` loads tensors into the engine's model, as `load_tensors` does.
        """
        super().__init__()
        self._load = load
        # vLLM has two model runners, which name it differently.
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        layer = getattr(getattr(drafter, "model", None), "model", None)
        if layer is None:
            raise WeightSyncError(
                "the learner trains a layer that drafts, and this engine has none"
            )
        self.model = model
        self.layer = layer

    def load_weights(self, tensors: Iterable[Named]) -> set[str]:
        """Loads tensors of both; returns the names of the loaded parameters."""
        drafts: list[Named] = []

        def others() -> Iterable[Named]:
            for name, tensor in tensors:
                if name.startswith(PREFIX):
                    drafts.append((name.removeprefix(PREFIX), tensor))
                else:
                    yield name, tensor

        loaded = self._load(self.model, others())
        if loaded is None:
            loaded = set(dict(self.model.named_parameters()))
        layer_names = self.layer.load_weights(drafts) if drafts else ()
        return {f"model.{name}" for name in loaded} | {f"layer.{name}" for name in layer_names}
