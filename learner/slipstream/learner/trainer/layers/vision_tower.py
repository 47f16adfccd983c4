"""transformers' vision towers, and the tables that models with them need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor


class Tower(torch.nn.Module):
    """transformers' vision tower, whose angles stay float32 in a model of another precision."""

    def __init__(self, inner: Megatron) -> None:
        super().__init__()
        self.inner = inner

    def _apply(self, fn: Any, recurse: bool = True) -> Tower:  # noqa: ANN401
        """Moves and casts the parameters; tables of angles are moved alone."""
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
        """Returns features [tokens of images, hidden size]: those of the embedding, then deeper."""
        pixels = images.pixels.to(next(self.inner.parameters()).dtype)
        found = self.inner(pixels, grid_thw=images.grids.to(pixels.device), return_dict=True)
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]


def frequency_axes(sections: list[int], interleaved: bool) -> Tensor:
    """Returns for each frequency the axis of positions that it turns by: time, height or width."""
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


def add_tower(provider: Megatron, make: Callable[[], Tower]) -> None:
    """Makes the first pipeline stage have a tower, before weights are loaded."""

    def with_tower(chunks: list[Megatron]) -> list[Megatron]:
        for chunk in chunks:
            if chunk.pre_process:
                embedding = next(chunk.embedding.parameters())
                chunk.visual = make().to(embedding.device, embedding.dtype)
        return chunks

    provider.register_pre_wrap_hook(with_tower)


def smallest_image(hf_config: Megatron) -> ImageInputs:
    """Returns an image of one token, of which no token of a micro batch takes features."""
    settings = hf_config.vision_config
    if hf_config.model_type == "mistral3":
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
