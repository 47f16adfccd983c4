"""The content of an environment's messages: text, or parts with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.core.machine.left_files import read_left
from slipstream.core.models.vision.data_urls import data_of_url
from slipstream.v1 import environment_pb2 as pb

# The bounds of `ChatMessage.parts` and `ContentPart.image` in environment.proto.
MAX_PARTS = 256
MAX_IMAGE_BYTES = 16 << 20
_FORMS = (
    '{"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": "data:..."}}, '
    '{"type": "image", "path": ...} or {"type": "image", "data": ...}'
)


def content_parts(content: object) -> list[pb.ContentPart]:
    """Returns the parts of a content that is no text; ValueError names a part of another form.

    A file is read here: what travels is its bytes.
    """
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise ValueError(f"content must be a text or a list of parts, got {_show(content)}")
    if len(content) > MAX_PARTS:
        raise ValueError(f"content must have at most {MAX_PARTS} parts, got {len(content)}")
    return [_part(part) for part in content]


def _part(part: object) -> pb.ContentPart:
    if not isinstance(part, Mapping):
        raise ValueError(f"a part must be {_FORMS}, got {_show(part)}")
    kind, url = part.get("type"), part.get("image_url")
    if kind == "text" and isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    if kind == "image_url" and isinstance(url, Mapping) and isinstance(url.get("url"), str):
        return pb.ContentPart(image=data_of_url(url["url"]))
    if kind == "image" and isinstance(part.get("data"), bytes):
        return pb.ContentPart(image=part["data"])
    if kind == "image" and isinstance(part.get("path"), str | Path):
        try:
            data = read_left(Path(part["path"]), MAX_IMAGE_BYTES, follow_link=True)
            return pb.ContentPart(image=data)
        except OSError as error:
            raise ValueError(f"an image cannot be read: {error}") from error
    raise ValueError(f"a part must be {_FORMS}, got {_show(part)}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
