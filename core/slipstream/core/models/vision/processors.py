"""Loads the image processor of a model folder: Qwen's or, for Mistral 3, Pixtral's.

Pixtral turns an image into one token for each merged patch, a break token after each row, and an
end token.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_table
from slipstream.core.models.registry import is_nested
from slipstream.core.models.vision.pixels import ImageProcessor, Pixels, decoded, size_of

# Field of processor_config.json -> default of the token at the end of a row, and of an image.
ROW_TOKENS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


@dataclass(frozen=True)
class PixtralProcessor(ImageProcessor):
    """Pixtral's image processor; the values of a patch are ordered by channel, row and column."""

    patch_size: int
    merge_size: int
    # Tokens at the end of a row, and of the image.
    break_id: int
    end_id: int

    # Positions have one axis, as in text.
    has_axes = False

    @property
    def merge(self) -> int:
        return self.merge_size

    @property
    def max_tokens(self) -> int:
        side = math.ceil(self._longest / self._square)
        return side * (side + 1)

    def tokens(self, token_id: int, data: bytes) -> list[int]:
        """Returns rows of `token_id`, each ended by `break_id`, the last one by `end_id`."""
        height, width = self._squares(data)
        found = ([token_id] * width + [self.break_id]) * height
        found[-1] = self.end_id
        return found

    def has_features(self, height: int, width: int) -> npt.NDArray[np.bool_]:
        """Returns a flag for each token of an image: true for placeholders, false for row ends."""
        return np.tile(np.arange(width + 1) < width, height)

    def pixels(self, data: bytes) -> Pixels:
        image, size = self.image(data), self.patch_size
        height, width = (side // size for side in image.shape[1:])
        patches = image.reshape(-1, height, size, width, size).transpose(1, 3, 0, 2, 4)
        values = np.ascontiguousarray(patches.reshape(height * width, -1))
        return Pixels(values, (1, height, width))

    def image(self, data: bytes) -> npt.NDArray[np.float32]:
        """Returns the pixels as float32 [channels, rows, columns]."""
        found = self.inner(images=[decoded(data)], patch_size=self._square, return_tensors="np")
        return np.ascontiguousarray(found["pixel_values"][0], dtype=np.float32)

    @property
    def _square(self) -> int:
        return self.patch_size * self.merge_size

    @property
    def _longest(self) -> int:
        return int(self.inner.size["longest_edge"])

    def _squares(self, data: bytes) -> tuple[int, int]:
        """Returns the rows and columns of an image in tokens."""
        width, height = size_of(data)
        ratio = max(1.0, height / self._longest, width / self._longest)
        rows, columns = (
            math.ceil(math.floor(side / ratio) / self._square) for side in (height, width)
        )
        if not rows * columns:
            raise ValueError(
                f"an image must keep a row and a column of pixels when its longer side is made "
                f"{self._longest}, got {width} * {height}"
            )
        return rows, columns


def load_pixtral(folder: Path, table: Mapping[str, Any]) -> PixtralProcessor:
    """Returns the processor of a folder, whose config.json is `table`.

    Raises ConfigError for settings that are not supported, and OSError, TypeError, KeyError or
    ValueError for files that cannot be read.
    """
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    path = folder / "processor_config.json"
    names = json.loads(path.read_text()) if path.is_file() else {}
    ids = row_tokens(names, json.loads((folder / "tokenizer.json").read_text()))
    for name, default in ROW_TOKENS.items():
        if name not in ids:
            raise ConfigError(
                f"model.path must hold a tokenizer with the token {names.get(name, default)!r}, "
                f"which stands between parts of an image, {folder}/tokenizer.json has none"
            )
    return PixtralProcessor(
        PixtralImageProcessorPil.from_pretrained(folder),
        patch_size=int(table["vision_config"]["patch_size"]),
        merge_size=int(table.get("spatial_merge_size", 2)),
        break_id=ids["image_break_token"],
        end_id=ids["image_end_token"],
    )


def row_tokens(names: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Returns the token ids of `ROW_TOKENS` by field name.

    `names` is the table of processor_config.json, and `tokenizer` the table of tokenizer.json. A
    token that the tokenizer lacks is left out. Raises KeyError, TypeError or ValueError for tables
    of another form.
    """
    ids = {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    wanted = {name: names.get(name, default) for name, default in ROW_TOKENS.items()}
    return {name: ids[token] for name, token in wanted.items() if token in ids}


@functools.lru_cache(maxsize=4)
def load_processor(folder: str | Path) -> ImageProcessor:
    """Returns the image processor of a folder. Raises ConfigError if its files cannot be read."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    table = read_model_table(Path(folder))
    try:
        if is_nested(table):
            return load_pixtral(Path(folder), table)
        return ImageProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model.path must hold the image processor of a model with vision: {folder}: {error}"
        ) from error
