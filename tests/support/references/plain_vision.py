"""Models that see images, by transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from slipstream.protocol.vision.pixels import ImageProcessor

Conversation = tuple[np.ndarray, Sequence[tuple[int, bytes]]]


def plain_model(folder: Path) -> torch.nn.Module:
    """The model of a folder; transformers 5.19 leaves tables of angles empty when it loads one."""
    from transformers import AutoModelForImageTextToText

    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_config(
        loaded.config, dtype=torch.float32, attn_implementation="eager"
    )
    plain.load_state_dict(loaded.state_dict())
    return plain


def _mask_of(is_image: torch.Tensor):
    """Says where images are: transformers also takes such tokens that a model has sampled."""

    def mask(_ids, inputs_embeds: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
        found = is_image[..., None].expand_as(inputs_embeds)
        return found, torch.zeros_like(found)

    return mask


def plain_logprobs(
    model: torch.nn.Module, folder: Path, conversations: Sequence[Conversation]
) -> list[torch.Tensor]:
    """Log-probabilities of all tokens but each first, one tensor for each conversation."""
    processor, found = ImageProcessor.load(folder), []
    for tokens, images in conversations:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        given = {}
        if images:
            pixels = [processor.pixels(data) for _, data in images]
            is_image = torch.zeros_like(ids)
            for offset, data in images:
                is_image[0, offset : offset + processor.num_tokens(data)] = 1
            given = {
                "pixel_values": torch.from_numpy(np.concatenate([p.values for p in pixels])),
                "image_grid_thw": torch.tensor([p.grid for p in pixels]),
                "mm_token_type_ids": is_image,
            }
            model.model.get_placeholder_mask = _mask_of(is_image.bool())
        scores = model(input_ids=ids, **given).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(1, ids[0, 1:, None])[:, 0])
    return found
