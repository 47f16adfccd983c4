"""Imports the modules of a trainer rank, and patches Megatron and Bridge for this device."""

import importlib

from slipstream.core.machine.process import without_collections

_PACKAGE = "slipstream.learner.trainer"


def preload() -> None:
    """Imports the modules that a rank needs, before it loads a model."""
    with without_collections():
        for name in ("ranks.cpu", "ranks.compat"):
            importlib.import_module(f"{_PACKAGE}.{name}").install()
        for name in ("layers.spec", "ranks.activity", "opening", "train"):
            importlib.import_module(f"{_PACKAGE}.{name}")
