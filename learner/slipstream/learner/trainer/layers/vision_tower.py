"""transformers' vision towers, and the tables that models with towers need."""

import torch
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.sequence_images import ImageInputs
from slipstream.learner.trainer.layers import keep_buffers
from torch import Tensor


class Tower(torch.nn.Module):
    """transformers' vision tower; its tables of rotary angles stay float32 in any model."""

    def __init__(self, inner: Megatron) -> None:
        super().__init__()
        self.inner = inner
        for module in inner.modules():
            keep_buffers(module, [name for name, _ in module.named_buffers(recurse=False)])

    def forward(self, images: ImageInputs) -> list[Tensor]:
        """Returns the embedding's features, then DeepStack's, each [image tokens, hidden size]."""
        pixels = images.pixels.to(next(self.inner.parameters()).dtype)
        output = self.inner(pixels, grid_thw=images.grids.to(pixels.device), return_dict=True)
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]


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


def smallest_image(hf_config: Megatron) -> ImageInputs:
    """Returns an image of one token for passes without images; no token uses its features."""
    settings = hf_config.vision_config
    merge = settings.spatial_merge_size
    width = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    nothing = torch.zeros(0, dtype=torch.int64)
    return ImageInputs(
        positions=nothing,
        rows=nothing,
        pixels=torch.zeros(merge**2, width),
        grids=torch.tensor([[1, merge, merge]]),
    )
