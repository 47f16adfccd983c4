"""Loads the image processor of a model folder, whose family decides its class."""

import functools
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_table
from slipstream.core.models.nested_decoders import is_nested
from slipstream.core.models.vision.pixels import ImageProcessor
from slipstream.core.models.vision.pixtral import load_pixtral


def load_processor(folder: str | Path) -> ImageProcessor:
    """Returns the processor of a folder. Raises ConfigError for one that cannot be read."""
    return _load(str(folder))


@functools.lru_cache(maxsize=4)
def _load(folder: str) -> ImageProcessor:
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
