"""Packages of other frameworks, which are imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

from slipstream.protocol.errors import ConfigError

# An object of another framework, whose types are not read here.
Foreign: TypeAlias = Any


def needs(module: str, package: str, advice: str) -> None:
    """Raises ConfigError with `advice` when `module` is not there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"{package} is not installed" if error.name == package else str(error)
        raise ConfigError(f"{what}: {advice}") from error
