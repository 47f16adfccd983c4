"""Images of training sequences, and the inputs that a vision model computes from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.core.models.images import ImageProcessor
from slipstream.core.types import Trajectory
from torch import Tensor

# Axes of a position: time, height and width.
_AXES = 3


@dataclass(frozen=True)
class SequenceImage:
    """An image whose first token is at position `offset` of its sequence."""

    offset: int
    # The encoded image, and the processor that makes pixels of it.
    data: bytes
    processor: ImageProcessor


def images_of(
    trajectory: Trajectory, tokens: slice, processor: ImageProcessor
) -> tuple[SequenceImage, ...]:
    """Returns the images within `tokens` of a trajectory, with offsets from the slice's start.

    Raises UntrainableBatch for an image that cannot be read, or whose tokens in the trajectory
    differ from the processor's.
    """
    name = trajectory.trajectory_id
    images = []
    for offset, image in trajectory.image_places:
        if not tokens.start <= offset < tokens.stop:
            continue
        data = trajectory.images[image]
        try:
            expected = processor.tokens(int(trajectory.token_ids[offset]), data)
        except ValueError as error:
            raise UntrainableBatch(f"{name}: {error}", [name]) from error
        end = offset + len(expected)
        if end > tokens.stop or trajectory.token_ids[offset:end].tolist() != expected:
            raise UntrainableBatch(f"{name}: an image of {len(expected)} tokens has others", [name])
        images.append(SequenceImage(offset - tokens.start, data, processor))
    return tuple(images)


@dataclass(frozen=True)
class ImageInputs:
    """The images of a micro batch as inputs of a vision model, with the positions of all tokens."""

    # int64 [tokens, 3]: the position of each token in time, height and width of its sequence.
    positions: Tensor
    # int64 [tokens]: the row of features that replaces the embedding, or -1 for other tokens.
    rows: Tensor
    # float32 [patches, values of a patch], all images in order.
    pixels: Tensor
    # int64 [images, 3], on the CPU: patches in time, height and width.
    grids: Tensor

    @classmethod
    def of(cls, images: Sequence[Sequence[SequenceImage]], lengths: Sequence[int]) -> ImageInputs:
        """Returns the inputs for packed sequences with these `images` and `lengths` in tokens."""
        num_rows = 0
        start = 0
        rows = np.full(sum(lengths), -1, dtype=np.int64)
        positions = []
        pixels = []
        grids = []
        for placed, length in zip(images, lengths, strict=True):
            spans = []
            for image in placed:
                pixels_of_image = image.processor.pixels(image.data)
                height, width = (side // image.processor.merge for side in pixels_of_image.grid[1:])
                first = start + image.offset
                count = height * width
                rows[first : first + count] = num_rows + np.arange(count)
                num_rows += count
                pixels.append(pixels_of_image.values)
                grids.append(pixels_of_image.grid)
                spans.append((image.offset, height, width))
            positions.append(image_positions(length, spans))
            start += length
        return cls(
            positions=torch.from_numpy(np.concatenate(positions)),
            rows=torch.from_numpy(rows),
            pixels=torch.from_numpy(np.concatenate(pixels)),
            grids=torch.tensor(grids),
        )

    def to(self, device: torch.device) -> ImageInputs:
        """Returns a copy on `device`; `grids` stays on the CPU."""
        return replace(
            self,
            positions=self.positions.to(device),
            rows=self.rows.to(device),
            pixels=self.pixels.to(device),
        )


def image_positions(length: int, spans: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
    """Returns the positions of one sequence's tokens, int64 [tokens, 3].

    The axes are time, height and width. `spans` has the offset, height and width of each image, in
    tokens. A text token advances all axes by one. The tokens of an image share one time and differ
    by row and column; text after an image continues after the largest position so far. Source:
    arXiv:2409.12191, section 2.1.
    """
    positions = np.empty((length, _AXES), dtype=np.int64)
    place = 0
    position = 0
    for offset, height, width in spans:
        positions[place:offset] = (position + np.arange(offset - place))[:, None]
        position += offset - place
        grid = np.moveaxis(np.indices((1, height, width)), 0, -1).reshape(-1, _AXES)
        place = offset + height * width
        positions[offset:place] = position + grid
        position += max(height, width)
    positions[place:] = (position + np.arange(length - place))[:, None]
    return positions
