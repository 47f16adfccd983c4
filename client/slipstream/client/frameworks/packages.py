"""Packages of other frameworks, which are imported where they are used."""

from __future__ import annotations

import importlib

from slipstream.protocol.errors import ConfigError


def needs(module: str, package: str, requirement: str) -> None:
    """Raises ConfigError, with the command that installs it, when `module` is not there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        import sys

        what = f"{package} is not installed" if error.name == package else str(error)
        command = f"{sys.executable} -m pip install {requirement}"
        raise ConfigError(f"{what}: {command}") from error
