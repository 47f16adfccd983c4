"""The tensors of a model's files that learner and rollout servers load, by the headers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slipstream.core.models.model_files import held_tensors
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.models.nested_decoders import TOWERS
from slipstream.core.models.vision_rules import sees_images
from slipstream.core.settings.config import Config

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_further(name: str, *, layers: int) -> bool:
    """Whether a tensor is of a layer behind the `layers` of a model, to predict further tokens."""
    place = _LAYER.match(name)
    return name.startswith("mtp.") or (place is not None and int(place[1]) >= layers)


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
