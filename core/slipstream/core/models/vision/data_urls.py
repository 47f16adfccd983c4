"""Images in data URLs, the one kind of URL that is read: nothing is ever fetched."""

from __future__ import annotations

import base64
import binascii


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
