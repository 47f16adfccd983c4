"""Images in the messages of agents: their bytes, and the text that a template writes for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.core.models.vision.data_urls import data_of_url

Message = Mapping[str, Any]
# Stands for an image in the messages that are rendered; no template may change its text.
MARK = "slipstreamimageplaceholder"
_IMAGE_PARTS = {"image_url", "input_image"}
_BEFORE, _AFTER = "slipstreambefore", "slipstreamafter"
# Parts of messages whose text vLLM reads; it would fetch pictures and files from where they name.
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal", "thinking"}


def without_images(
    messages: Sequence[Message], *, sees_images: bool
) -> tuple[list[Message], list[list[bytes]]]:
    """Returns the messages with a mark in the place of each image, and the images of each message.

    ValueError for a part that is neither text nor an image in a data URL, or for an image unless
    the model `sees_images`.
    """
    marked: list[Message] = []
    images: list[list[bytes]] = []
    for message in messages:
        found: list[bytes] = []
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            parts = [_marked(part, found, sees_images=sees_images) for part in content]
            message = {**message, "content": parts} if found else message
        marked.append(message)
        images.append(found)
    return marked, images


def _marked(part: object, images: list[bytes], *, sees_images: bool) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else "text"
    if kind in _TEXT_PARTS:
        return part
    if not (sees_images and kind in _IMAGE_PARTS and isinstance(part, Mapping)):
        allowed = "text or images" if sees_images else "text"
        raise ValueError(f"messages of agents must be {allowed}, got a part of type {kind}")
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    images.append(data_of_url(str(url)))
    return {"type": "text", "text": MARK}


def text_of_an_image(
    tokenizer: Any,  # noqa: ANN401 - transformers' own
    template: str | None,
) -> str:
    """Returns what the chat template writes for an image; None stands for the tokenizer's own."""
    parts = [
        {"type": "text", "text": _BEFORE},
        {"type": "image"},
        {"type": "text", "text": _AFTER},
    ]
    message = {"role": "user", "content": parts}
    text = str(tokenizer.apply_chat_template([message], chat_template=template, tokenize=False))
    return text.partition(_BEFORE)[2].partition(_AFTER)[0]
