"""The vision tower of Mistral 3: transformers' Pixtral, and what projects to the decoder."""

from __future__ import annotations

import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.layers.vision_tower import Tower
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

        Each image is computed by itself, without the mask of all pairs of patches that
        transformers' forward makes for images together.
        """
        parts: Megatron = self.inner
        tower, size = parts.vision_tower, self._patch_size
        pixels = images.pixels.to(next(parts.parameters()).dtype)
        sides = [(int(height), int(width)) for _, height, width in images.grids]
        found = []
        for patches, (height, width) in zip(
            torch.split(pixels, [height * width for height, width in sides]), sides, strict=True
        ):
            # The convolution of whole patches gives each of them one vector.
            embedded = tower.patch_conv(patches.view(height * width, -1, size, size))
            states = tower.ln_pre(embedded.flatten(1)[None])
            angles = tower.patch_positional_embedding(states, _places(height, width, states.device))
            states = tower.transformer(states, position_embeddings=angles).last_hidden_state[0]
            sizes = [(height * size, width * size)]
            found.append(parts.multi_modal_projector(states, sizes))
        return [torch.cat(found)]


def _places(height: int, width: int, device: torch.device) -> Tensor:
    """Returns row and column of each patch."""
    rows = torch.arange(height, device=device).repeat_interleave(width)
    return torch.stack([rows, torch.arange(width, device=device).repeat(height)], dim=-1)
