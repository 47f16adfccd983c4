"""Checks that a Hugging Face folder has all files that a run loads, without loading them."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.core.models.model_rules import sees_images
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.models.registry import TOWERS
from slipstream.core.regular_files import open_regular
from slipstream.core.settings.config import Config

# Files that hold a tokenizer's vocabulary, by transformers' names; one of them is enough.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
INDEX = "model.safetensors.index.json"
# A safetensors file begins with 8 bytes, the length of its header, at most MAX_HEADER_BYTES.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def missing_files(folder: Path, template: Path | None = None) -> list[str]:
    """Returns one message for each file or part without which a run cannot load the model.

    `folder` has a config.json. `template` is the chat template file that the settings name, if any;
    with it the tokenizer needs no template of its own.
    """
    return [*missing_weights(folder, "model.path"), *missing_tokenizer(folder, template)]


def missing_tokenizer(folder: Path, template: Path | None) -> list[str]:
    """Returns one message on what the tokenizer lacks, or [] if it lacks nothing.

    The arguments are as in `missing_files`.
    """
    rule = "model.path must hold the tokenizer too"
    if not (folder / "tokenizer_config.json").is_file():
        return [f"{rule}, but {folder} has no tokenizer_config.json"]
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return [f"{rule}, but {folder} has none of {', '.join(VOCABULARIES)}"]
    if template is None and not _has_chat_template(folder):
        return [
            f"model.path must hold a tokenizer with a chat template, but {folder} has neither "
            "chat_template.jinja nor chat_template in tokenizer_config.json: name a file with one "
            "in rollout_server.chat_template"
        ]
    return []


def missing_weights(folder: Path, setting: str) -> list[str]:
    """Returns one message for each fault of the weights in the folder that `setting` names.

    Only headers are read. The usual cause is an incomplete download.
    """
    if not any(folder.glob("*.safetensors")):
        if folder.parent.name == "snapshots":
            return [
                f"{setting} has no weights in the hub's cache yet, {folder}: a dry run brings none"
            ]
        return [f"{setting} must hold safetensors weights, but {folder} has none"]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    # Rollout servers read only this folder.
    is_served = setting == "model.path"
    if is_served and any(name.startswith("consolidated") for name in names):
        return [
            f"{setting} must not hold Mistral's own form beside that of Hugging Face, which "
            f"rollout servers would read in its place: remove consolidated*.safetensors and "
            f"params.json from {folder}"
        ]
    return [f"{setting} must hold whole files: {each}" for each in _damages(folder, names)]


def _damages(folder: Path, names: list[str]) -> Iterator[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            yield f"{index} is no index of safetensors ({type(error).__name__}: {error})"
            return
        except OSError as error:
            yield f"{index} cannot be read: {error.strerror}"
            return
        for name in sorted(shards - set(names)):
            yield f"{folder / name} is missing, which {INDEX} names"
        names = [name for name in names if name in shards]
    for name in names:
        yield from _damage(folder / name)


def _damage(path: Path) -> Iterator[str]:
    size = path.stat().st_size
    try:
        needed = _bytes_needed(path, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield f"{path}, {size:,} bytes, does not begin as a safetensors file does"
        return
    except OSError as error:
        yield f"{path} cannot be read: {error.strerror}"
        return
    if size < needed:
        yield f"{path} has {size:,} of {needed:,} bytes"


def read_header(path: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets of each tensor by name, from a complete file."""
    with open_regular(path) as file:
        header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def held_tensors(folder: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Returns the file and the shape of each tensor of the model in `folder`, by tensor name.

    The files must be complete. If the folder has an index, only the tensors that it names are
    returned.
    """
    index = folder / INDEX
    if not index.is_file():
        paths = sorted(folder.glob("*.safetensors"))
        return {name: (path, shape) for path in paths for name, shape in _shapes(path).items()}
    shapes = cache(_shapes)
    places = json.loads(index.read_text())["weight_map"].items()
    files = {name: folder / file for name, file in places}
    return {
        name: (path, shapes(path)[name]) for name, path in files.items() if name in shapes(path)
    }


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor["shape"]) for name, tensor in read_header(path).items()}


def _bytes_needed(path: Path, size: int) -> int:
    """Returns the least size of the complete file by its header; `size` is its present size.

    Raises ValueError if the header's length is missing or too large.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise ValueError(path)
        start = LENGTH_BYTES + length
        if size < start:
            return start
    ends = [tensor["data_offsets"][1] for tensor in read_header(path).values()]
    return start + max(ends, default=0)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    if (folder / "additional_chat_templates").is_dir():
        return True
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (ValueError, RecursionError):
        # The tokenizer's own loader reports this fault.
        return True
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def is_further(name: str, *, layers: int) -> bool:
    """Whether the tensor `name` belongs to a layer after the first `layers` layers.

    Such layers predict further tokens (multi-token prediction), and are not loaded.
    """
    place = _LAYER.match(name)
    is_apart = name.startswith(("mtp.", "model.mtp_layers."))
    return is_apart or (place is not None and int(place[1]) >= layers)


def loaded_tensors(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor of `config.model.path` that a run loads."""
    held = held_tensors(config.model.path)
    if not held:
        return
    sizes = read_model_sizes(config.model.path)
    left_out = TOWERS if sizes.is_nested and not sees_images(config, sizes) else ()
    for name, (_, shape) in held.items():
        if not (name.startswith(left_out) or is_further(name, layers=sizes.layers)):
            yield name, shape
