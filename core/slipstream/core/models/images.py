"""Images in conversations: their bytes, their pixels, and where their tokens are.

Servers and trainer turn images into patches in the same way: both use transformers' PIL processor
on every host, since torchvision resizes differently.
"""

import asyncio
import base64
import binascii
import functools
import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_sizes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# An image of so many pixels takes 50 MB before it is made smaller.
MAX_PIXELS = 1 << 24
# EXIF's tag of an image's orientation, what each value asks of a viewer, and the first value of
# those that exchange width and height.
_ORIENTATION = 0x0112
_FIRST_ON_SIDE = 5
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Images that are known to be readable: the members of a group have the same images.
_KEPT_IMAGES = 32


class Pixels(NamedTuple):
    """One image: float32 [patches, values of a patch], and its grid of patches, (1, height, width).

    Patches are grouped by token.
    """

    values: npt.NDArray[np.float32]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class ImageProcessor:
    """Qwen's image processor, with the settings in a model folder's preprocessor_config.json."""

    # transformers' PIL processor, here Qwen2VLImageProcessorPil.
    inner: Any

    @property
    def merge(self) -> int:
        """The number of patches along each side of the square that is merged into one token."""
        return int(self.inner.merge_size)

    @property
    def max_tokens(self) -> int:
        side = int(self.inner.patch_size) * self.merge
        return int(self.inner.size["longest_edge"]) // side**2

    def tokens(self, token_id: int, data: bytes) -> list[int]:
        """Returns an image's tokens in a prompt, by its header; raises ValueError if it is none."""
        width, height = size_of(data)
        patches = int(self.inner.get_number_of_image_patches(height, width))
        return [token_id] * (patches // self.merge**2)

    def pixels(self, data: bytes) -> Pixels:
        """Returns the pixels of a PNG, JPEG, WebP or GIF. Raises ValueError for other bytes."""
        processed = self.inner(images=[decoded(data)], return_tensors="np")
        grid = processed["image_grid_thw"][0]
        values = np.ascontiguousarray(processed["pixel_values"], dtype=np.float32)
        return Pixels(values, (int(grid[0]), int(grid[1]), int(grid[2])))


def decoded(data: bytes) -> Any:  # noqa: ANN401 - Pillow's
    """Returns an image in RGB as people see it, upright and on white; raises ValueError."""
    from PIL import Image

    with opened(data) as image:
        upright = image
        turn = _TURNS.get(_orientation(image))
        if image.has_transparency_data:
            seen = image.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
        if image.mode.startswith("I"):
            # Pillow would cut shades of 16 bits off at 255.
            upright = image.point(lambda shade: shade * (1 / 257))
        upright = upright.convert("RGB")
        return upright if turn is None else upright.transpose(Image.Transpose[turn])


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height of an image when upright, by its header; raises ValueError."""
    with opened(data) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= _FIRST_ON_SIDE else (width, height)


def _orientation(image: Any) -> int:  # noqa: ANN401 - Pillow's
    """Returns EXIF's orientation of an image as cameras write it, or 1."""
    if image.format not in ("JPEG", "WEBP"):
        return 1
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, struct.error):
        # Viewers show an image whose EXIF is broken as it is.
        return 1
    return orientation if orientation in _TURNS else 1


@contextmanager
def opened(data: bytes) -> Iterator[Any]:
    """Yields a Pillow image of which only the header was read; raises ValueError."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(
                    f"an image must have at most {MAX_PIXELS} pixels, got {width} * {height}"
                )
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error


def data_of_url(url: str) -> bytes:
    """Returns the bytes of `data:image/...;base64,...`. Raises ValueError for any other URL."""
    head, separator, text = url.partition(",")
    if not (separator and head.startswith("data:image/") and head.endswith(";base64")):
        raise ValueError(
            "the URL of an image must be data:image/...;base64,..., as nothing is fetched, "
            f"got {url[:60]!r}"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data URL of an image is no base64: {error}") from error


@functools.lru_cache(maxsize=4)
def load_processor(folder: str | Path) -> ImageProcessor:
    """Returns the image processor of a folder. Raises ConfigError if its files cannot be read."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return ImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.path must hold the image processor of a model with vision: {folder}: {error}"
        ) from error


class PlacedImage(NamedTuple):
    """An encoded image whose first token is at `offset` of a sequence."""

    offset: int
    data: bytes

    def moved(self, distance: int) -> Self:
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
        expanded: list[int] = []
        placed: list[PlacedImage] = []
        written = sum(token == self.token_id for token in token_ids)
        if written != len(images):
            raise ValueError(
                f"the chat template must write token {self.token_id} once for each of the "
                f"{len(images)} images, it wrote {written}: a text may not hold it"
            )
        unplaced = iter(images)
        for token in token_ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            image = next(unplaced)
            placed.append(PlacedImage(len(expanded), image))
            expanded += self.processor.tokens(token, image)
        return expanded, placed


def image_tokens(folder: Path) -> ImageTokens | None:
    """Returns the `ImageTokens` of a folder, or None if its model has no vision."""
    sizes = read_model_sizes(folder)
    if not sizes.has_vision:
        return None
    return ImageTokens(int(sizes.image_token), load_processor(folder))


async def check_pixels(images: Sequence[PlacedImage]) -> None:
    """Decodes the images in threads, one after the other. Raises ValueError for a broken image.

    Other code may miss a broken image: tokens are counted from its header only, and the engine,
    which decodes images, never sees replies that the environment gives.
    """
    for image in images:
        await asyncio.to_thread(_check, image.data)


@functools.lru_cache(_KEPT_IMAGES)
def _check(data: bytes) -> None:
    decoded(data)
