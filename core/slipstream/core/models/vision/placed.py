"""Images with the offsets of their tokens in a token sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.models.vision.pixels import ImageProcessor, decoded
from slipstream.core.models.vision.processors import load_processor

# Images that are known to be readable: the members of a group have the same images.
_KEPT_IMAGES = 32


class PlacedImage(NamedTuple):
    """An encoded image whose first token is at `offset` of a sequence."""

    offset: int
    data: bytes

    def moved(self, distance: int) -> PlacedImage:
        """Returns the image with its offset increased by `distance` tokens."""
        return self._replace(offset=self.offset + distance)


@dataclass(frozen=True)
class ImageTokens:
    """Expands the one token that a chat template writes for an image into all of its tokens."""

    token_id: int
    processor: ImageProcessor

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[bytes]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Returns `token_ids` with each image's token expanded, and the images with offsets.

        Raises ValueError unless there is one image token for each image, since the text may contain
        the token too.
        """
        found: list[int] = []
        placed: list[PlacedImage] = []
        written = sum(token == self.token_id for token in token_ids)
        if written != len(images):
            raise ValueError(
                f"the chat template must write token {self.token_id} once for each of the "
                f"{len(images)} images, it wrote {written}: a text may not hold it"
            )
        left = iter(images)
        for token in token_ids:
            if token != self.token_id:
                found.append(token)
                continue
            image = next(left)
            placed.append(PlacedImage(len(found), image))
            found += self.processor.tokens(token, image)
        return found, placed


def image_tokens(folder: Path, *, max_images: int) -> ImageTokens | None:
    """Returns the `ImageTokens` of a Hugging Face folder, or None if it is used without vision.

    A model whose vision tower can be left out is used without it if `max_images` is 0.
    """
    sizes = read_model_sizes(folder)
    if not sizes.has_vision or (sizes.is_nested and not max_images):
        return None
    return ImageTokens(int(sizes.image_token), load_processor(folder))


async def check_pixels(images: Sequence[PlacedImage]) -> None:
    """Decodes the images in threads, one after the other. Raises ValueError for a broken image.

    Other code may miss a broken image: tokens are counted from its header only, and the engine,
    which decodes images, never sees replies that the environment gives.
    """
    for image in images:
        await asyncio.to_thread(_check, image.data)


@lru_cache(_KEPT_IMAGES)
def _check(data: bytes) -> None:
    decoded(data)
