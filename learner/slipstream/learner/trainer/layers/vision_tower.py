"""transformers' vision towers, and the tables that models with towers need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from slipstream.core.models.registry import NESTED
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.training_sequence import ImageInputs
from torch import Tensor


class Tower(torch.nn.Module):
    """transformers' vision tower; its tables of rotary angles stay float32 in any model."""

    def __init__(self, inner: Megatron) -> None:
        super().__init__()
        self.inner = inner

    def _apply(self, fn: Any, recurse: bool = True) -> Tower:  # noqa: ANN401
        """Moves and casts the parameters; moves the tables of angles without a cast."""
        tables = [
            (module, name, table)
            for module in self.inner.modules()
            for name, table in module.named_buffers(recurse=False)
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.inner.parameters()).device
        for module, name, table in tables:
            setattr(module, name, table.to(device))
        return self

    def forward(self, images: ImageInputs) -> list[Tensor]:
        """Returns the embedding's features, then DeepStack's, each [image tokens, hidden size]."""
        pixels = images.pixels.to(next(self.inner.parameters()).dtype)
        found = self.inner(pixels, grid_thw=images.grids.to(pixels.device), return_dict=True)
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]


def frequency_axes(sections: list[int], interleaved: bool) -> Tensor:
    """Returns the position axis of each rotary frequency: 0 for time, 1 for height, 2 for width.

    `sections` has the number of frequencies of each axis.
    """
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def add_tower(provider: Megatron, make: Callable[[], Tower]) -> None:
    """Adds a tower, built by `make`, to the first pipeline stage before weights are loaded."""

    def with_tower(chunks: list[Megatron]) -> list[Megatron]:
        for chunk in chunks:
            if chunk.pre_process:
                embedding = next(chunk.embedding.parameters())
                chunk.visual = make().to(embedding.device, embedding.dtype)
        return chunks

    provider.register_pre_wrap_hook(with_tower)


def smallest_image(hf_config: Megatron) -> ImageInputs:
    """Returns an image of one token for passes without images; no token uses its features."""
    settings = hf_config.vision_config
    if hf_config.architectures[0] in NESTED:
        merge, depth = hf_config.spatial_merge_size, settings.num_channels
    else:
        merge, depth = settings.spatial_merge_size, settings.in_channels
        depth *= settings.temporal_patch_size
    width = depth * settings.patch_size**2
    nothing = torch.zeros(0, dtype=torch.int64)
    return ImageInputs(
        positions=nothing,
        rows=nothing,
        pixels=torch.zeros(merge**2, width),
        grids=torch.tensor([[1, merge, merge]]),
    )


class PixtralTower(Tower):
    """Pixtral's tower, with one feature vector for each square of patches, row by row."""

    def __init__(self, settings: Megatron) -> None:
        from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
        from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

        tower = PixtralVisionModel._from_config(
            settings.vision_config, attn_implementation="sdpa", dtype=torch.float32
        )
        projector = Mistral3MultiModalProjector(settings)
        parts = {"vision_tower": tower, "multi_modal_projector": projector}
        super().__init__(torch.nn.ModuleDict(parts))
        self._patch_size: int = settings.vision_config.patch_size

    def forward(self, images: ImageInputs) -> list[Tensor]:
        """Returns the features of all images, one tensor [feature vectors, hidden size] in a list.

        Images are computed separately: transformers computes all together, with a mask over all
        pairs of patches.
        """
        parts: Megatron = self.inner
        tower, size = parts.vision_tower, self._patch_size
        pixels = images.pixels.to(next(parts.parameters()).dtype)
        sides = [(int(height), int(width)) for _, height, width in images.grids]
        found = []
        for patches, (height, width) in zip(
            torch.split(pixels, [height * width for height, width in sides]), sides, strict=True
        ):
            # The convolution of whole patches gives one vector for each patch.
            embedded = tower.patch_conv(patches.view(height * width, -1, size, size))
            states = tower.ln_pre(embedded.flatten(1)[None])
            # Row and column of each patch.
            places = torch.cartesian_prod(
                torch.arange(height, device=states.device),
                torch.arange(width, device=states.device),
            )
            angles = tower.patch_positional_embedding(states, places)
            states = tower.transformer(states, position_embeddings=angles).last_hidden_state[0]
            sizes = [(height * size, width * size)]
            found.append(parts.multi_modal_projector(states, sizes))
        return [torch.cat(found)]
