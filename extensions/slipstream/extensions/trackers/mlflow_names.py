"""Names that MLflow takes for metrics and settings."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable

MAX_NAME_CHARACTERS = 250
NOT_ALLOWED = re.compile(r"[^\w\-. /]")


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the name at MLflow of each metric or setting, another one for each of them.

    MLflow refuses most signs, and names that are no clean relative path. Each refused sign or part
    becomes an underscore. Names that would then be alike end with a digest of the whole name.
    """
    allowed = {name: _allowed_name(name) for name in names}
    counts = Counter(allowed.values())
    return {
        name: new if new == name or counts[new] == 1 else _with_digest(new, name)
        for name, new in allowed.items()
    }


def _allowed_name(name: str) -> str:
    parts = NOT_ALLOWED.sub("_", name).split("/")
    new = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if new.startswith(".."):
        new = f"_{new}"
    return new if len(new) <= MAX_NAME_CHARACTERS else _with_digest(new, name)


def _with_digest(new: str, name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    start = new[: MAX_NAME_CHARACTERS - len(digest) - 1].rstrip("/")
    return f"{start}_{digest}"
