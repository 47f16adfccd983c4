"""Prompts for vLLM: exact tokens, and pixels of our own where there are images."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from slipstream.core.models.vision.pixtral import PixtralProcessor
from slipstream.core.models.vision.placed import PlacedImage
from slipstream.core.models.vision.processors import load_processor
from slipstream.rollout_server.vllm.engine_pause import EnginePause
from vllm.inputs.engine import MultiModalInput, TokensInput, mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

# Images whose pixels are kept: the members of a group have the same images.
_KEPT_IMAGES = 32


class Prompts:
    """Makes prompts for the model of one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._item = lru_cache(_KEPT_IMAGES)(self._new_item)

    async def prompt(
        self,
        token_ids: Sequence[int],
        images: Sequence[PlacedImage],
        pauses: EnginePause,
    ) -> TokensInput | MultiModalInput:
        """Returns vLLM's input; ValueError for an image that cannot be read.

        vLLM keeps features of images by name: new weights make other features, so names have the
        version.
        """
        if not images:
            return tokens_input(list(token_ids), cache_salt=pauses.salt)
        items = [await asyncio.to_thread(self._item, image.data) for image in images]
        return mm_input(
            list(token_ids),
            MultiModalKwargsItems({"image": [item for item, _ in items]}),
            {"image": [f"{_name(image.data)}:{pauses.version}" for image in images]},
            {
                "image": [
                    PlaceholderRange(
                        offset=image.offset, length=len(has_features), is_embed=has_features
                    )
                    for image, (_, has_features) in zip(images, items, strict=True)
                ]
            },
            cache_salt=pauses.salt,
        )

    def _new_item(self, data: bytes) -> tuple[MultiModalKwargsItem, torch.Tensor]:
        """Returns the pixels of an image for vLLM, and which of its tokens take features."""
        processor = load_processor(self._folder)
        pixels = processor.pixels(data)
        rows, columns = (side // processor.merge for side in pixels.grid[1:])
        has_features = torch.from_numpy(processor.has_features(rows, columns))
        if isinstance(processor, PixtralProcessor):
            image = MultiModalFieldElem(
                torch.from_numpy(processor.image(data)), MultiModalBatchedField()
            )
            return MultiModalKwargsItem({"pixel_values": image}), has_features
        values, grid = torch.from_numpy(pixels.values), torch.tensor(pixels.grid)
        whole = MultiModalFlatField(slices=[slice(0, len(values))])
        item = MultiModalKwargsItem(
            {
                "pixel_values": MultiModalFieldElem(values, whole),
                "image_grid_thw": MultiModalFieldElem(
                    grid, MultiModalBatchedField(keep_on_cpu=True)
                ),
            }
        )
        return item, has_features


@lru_cache(_KEPT_IMAGES)
def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
