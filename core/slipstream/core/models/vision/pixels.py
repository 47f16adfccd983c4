"""Turns images into pixel patches for vision models, in the same way on servers and trainer.

Both use transformers' PIL processor on every host, since torchvision resizes differently.
"""

import base64
import binascii
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# An image of so many pixels takes 50 MB before it is made smaller.
MAX_PIXELS = 1 << 24
# EXIF's tag of an image's orientation, what each value asks of a viewer, and the first value of
# those that exchange width and height.
_ORIENTATION, _FIRST_ON_SIDE = 0x0112, 5
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class Pixels(NamedTuple):
    """One image: float32 [patches, values of a patch], and its grid of patches, (1, height, width).

    The processor decides the order of patches: grouped by token, or row by row.
    """

    values: npt.NDArray[np.float32]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class ImageProcessor:
    """Qwen's image processor, with the settings in a model folder's preprocessor_config.json."""

    # transformers' PIL processor, here Qwen2VLImageProcessorPil.
    inner: Any

    # Whether positions of its tokens have three axes.
    has_axes = True

    @property
    def merge(self) -> int:
        """The number of patches along each side of the square that is merged into one token."""
        return int(self.inner.merge_size)

    @property
    def max_tokens(self) -> int:
        """The most tokens that one image can have."""
        side = int(self.inner.patch_size) * self.merge
        return int(self.inner.size["longest_edge"]) // side**2

    def tokens(self, token_id: int, data: bytes) -> list[int]:
        """Returns the tokens that stand for an image in a prompt; reads its header only.

        `token_id` is the placeholder of image features. Raises ValueError for bytes that are no
        image, and for too many pixels.
        """
        width, height = size_of(data)
        patches = int(self.inner.get_number_of_image_patches(height, width))
        return [token_id] * (patches // self.merge**2)

    def has_features(self, height: int, width: int) -> npt.NDArray[np.bool_]:
        """Returns a flag for each token of an image: true for placeholders of features.

        `height` and `width` are the numbers of rows and columns of placeholders.
        """
        return np.ones(height * width, dtype=np.bool_)

    def pixels(self, data: bytes) -> Pixels:
        """Returns the pixels of a PNG, JPEG, WebP or GIF. Raises ValueError for other bytes."""
        found = self.inner(images=[decoded(data)], return_tensors="np")
        grid = found["image_grid_thw"][0]
        values = np.ascontiguousarray(found["pixel_values"], dtype=np.float32)
        return Pixels(values, (int(grid[0]), int(grid[1]), int(grid[2])))


def decoded(data: bytes) -> Any:  # noqa: ANN401 - Pillow's
    """Returns an encoded image as Pillow's, in RGB, as people see it: upright and on white.

    Raises ValueError for unreadable pixels.
    """
    from PIL import Image

    with opened(data) as image:
        found, turn = image, _TURNS.get(_orientation(image))
        if image.has_transparency_data:
            seen = image.convert("RGBA")
            found = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
        found = found.convert("RGB")
        return found if turn is None else found.transpose(Image.Transpose[turn])


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height of an image when it is upright; only its header is read.

    Raises ValueError for bytes that are no image, and for too many pixels.
    """
    with opened(data) as image:
        width, height = image.size
        return (height, width) if _orientation(image) >= _FIRST_ON_SIDE else (width, height)


def _orientation(image: Any) -> int:  # noqa: ANN401 - Pillow's
    """Returns EXIF's orientation of an image as cameras write it, or 1."""
    if image.format not in ("JPEG", "WEBP"):
        return 1
    try:
        found = image.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, struct.error):
        # Viewers show an image whose EXIF is broken as it is.
        return 1
    return found if found in _TURNS else 1


@contextmanager
def opened(data: bytes) -> Iterator[Any]:
    """Yields a Pillow image of which only the header has been read.

    Raises ValueError if the image cannot be read or has too many pixels.
    """
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
    head, found, text = url.partition(",")
    if not (found and head.startswith("data:image/") and head.endswith(";base64")):
        raise ValueError(
            "the URL of an image must be data:image/...;base64,..., as nothing is fetched, "
            f"got {url[:60]!r}"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data URL of an image is no base64: {error}") from error
