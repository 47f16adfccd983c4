"""What an extension may do to a model while it is opened, before it has an optimizer."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from slipstream.core.extension import active, resolve
from slipstream.core.settings.config import Config
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.logprobs import HeadKernels
from slipstream.learner.trainer.model.model import DeviceMemory
from slipstream.learner.trainer.model.sharing import Sharing
from torch import Tensor


class LayerBeside(torch.nn.Module):
    """A layer that is trained beside the policy, and stored, published and exported with it.

    All ranks hold the same values.
    """

    @abstractmethod
    def named(self) -> Mapping[str, Tensor]:
        """Returns views of the values by the names that the layer's folder has for them."""

    @abstractmethod
    def published(self) -> Mapping[str, Tensor]:
        """Returns views of the values by their names among the published weights."""

    @abstractmethod
    def write_folder(self, folder: Path, dtype: str) -> None:
        """Makes `folder` with all that stands beside the values, whose element type is `dtype`."""


class ModelPart:
    """A part of the models of a run; it overrides the methods for what it takes part in.

    Every method is collective, and returns None where the part adds nothing.
    """

    def changed(self, chunks: list[Megatron]) -> list[Megatron]:
        """Changes the chunks of the policy after loading, before they get gradients."""
        return chunks

    def layer(self, device: torch.device, *, load_weights: bool) -> LayerBeside | None:
        """Returns a layer beside the policy, random unless `load_weights`."""
        return None

    def sharing(
        self,
        chunks: list[Megatron],
        device: torch.device,
        *,
        sees_images: bool,
    ) -> Sharing | None:
        """Returns what packs sequences with common prefixes for a model."""
        return None

    def memory(self) -> DeviceMemory | None:
        """Returns what decides where the tensors of a model are while nothing uses them."""
        return None

    def kernels(self) -> HeadKernels | None:
        """Returns the kernels that compute logits and log-probabilities of a model."""
        return None


def model_parts(config: Config) -> list[ModelPart]:
    """Makes the parts of models that the settings ask for; imports the modules of no others."""
    places = [extension.model for extension in active(config) if extension.model]
    return [resolve(place)(config) for place in places]
