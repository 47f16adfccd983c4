"""Imports the modules of a trainer rank, and patches Megatron and Bridge for this device."""

import importlib
from collections.abc import Sequence

from slipstream.core.machine.process import without_collections

_PACKAGE = "slipstream.learner.trainer"


def preload(_: Sequence[str] = ()) -> None:
    """Imports the modules that a rank needs; a fork server calls this with an ignored argument."""
    with without_collections():
        for name in ("ranks.cpu", "ranks.compat"):
            importlib.import_module(f"{_PACKAGE}.{name}").install()
        for name in ("layers.spec", "ranks.activity", "opening", "train"):
            importlib.import_module(f"{_PACKAGE}.{name}")
