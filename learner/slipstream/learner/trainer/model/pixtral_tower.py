"""The vision tower of Mistral 3: transformers' Pixtral, and what projects to the decoder."""

from __future__ import annotations

import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.model.vision_tower import Tower
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor


class _Parts(torch.nn.Module):
    """The tower and its projector by transformers' names."""

    def __init__(self, settings: Megatron) -> None:
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
        from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

        super().__init__()
        self.vision_tower = PixtralVisionModel._from_config(
            settings.vision_config, attn_implementation="sdpa", dtype=torch.float32
        )
        self.multi_modal_projector = Mistral3MultiModalProjector(settings)


class PixtralTower(Tower):
    """Gives one feature for each square of patches, by rows."""

    def __init__(self, settings: Megatron) -> None:
        super().__init__(_Parts(settings))
        self._patch_size: int = settings.vision_config.patch_size

    def forward(self, images: ImageInputs) -> list[Tensor]:
        """Returns features [tokens of images with features, hidden size].

        Each image is computed by itself: together they would need a mask of all their patches.
        """
        parts: Megatron = self.inner
        pixels = images.pixels.to(next(parts.parameters()).dtype)
        sides = [(int(height), int(width)) for _, height, width in images.grids]
        found = []
        for patches, (height, width) in zip(
            torch.split(pixels, [height * width for height, width in sides]), sides, strict=True
        ):
            size = self._patch_size
            image = patches.view(height, width, -1, size, size).permute(2, 0, 3, 1, 4)
            whole = image.reshape(1, -1, height * size, width * size)
            sizes = [(height * size, width * size)]
            states = parts.vision_tower(whole, image_sizes=sizes, return_dict=True)
            features = parts.multi_modal_projector(states.last_hidden_state[0], sizes)
            found.append(features)
        return [torch.cat(found)]
