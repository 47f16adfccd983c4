"""Models that see images, by transformers alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from slipstream.core.models.images import load_processor

from support.ranks.vision_ranks import Conversation


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

    def mask(_ids, inputs_embeds: torch.Tensor, **_: object) -> object:
        mask = is_image[..., None].expand_as(inputs_embeds)
        return mask, torch.zeros_like(mask)

    return mask


def plain_logprobs(
    model: torch.nn.Module, folder: Path, conversations: Sequence[Conversation]
) -> list[torch.Tensor]:
    """Log-probabilities of all tokens but each first, one tensor for each conversation."""
    found = []
    outputs = plain_outputs(model, folder, conversations)
    for (tokens, _), output in zip(conversations, outputs, strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))
        found.append(output[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return found


def plain_outputs(
    model: torch.nn.Module, folder: Path, conversations: Sequence[Conversation]
) -> list[torch.Tensor]:
    """What the last layer gives for each token, one tensor for each conversation."""
    processor = load_processor(folder)
    found = []
    for tokens, images in conversations:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        settings = {}
        is_image = torch.zeros_like(ids)
        for offset, data in images:
            token_id = int(tokens[offset])
            is_image_token = torch.tensor(processor.tokens(token_id, data)) == token_id
            is_image[0, offset : offset + len(is_image_token)] = is_image_token
        if images:
            pixels = [processor.pixels(data) for _, data in images]
            settings = {
                "pixel_values": torch.from_numpy(
                    np.concatenate([p.values for p in pixels])
                ),
                "image_grid_thw": torch.tensor([p.grid for p in pixels]),
                "mm_token_type_ids": is_image,
            }
            model.model.get_placeholder_mask = _mask_of(is_image.bool())
        found.append(model(input_ids=ids, **settings).logits[0])
    return found
