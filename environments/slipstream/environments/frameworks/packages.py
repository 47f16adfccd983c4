"""Imports a framework's package and a user's functions."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

from slipstream.core.errors import ConfigError

# An object of another framework, whose types are not read here.
Foreign: TypeAlias = Any


def import_package(module: str, *, install: str) -> ModuleType:
    """Imports and returns the package of a framework, or a module of the package.

    Raises ConfigError, which names the missing package and the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            missing = f"the package {package!r} is missing"
        else:
            missing = f"the package {package!r} needs {error.name!r}, which is missing"
        raise ConfigError(f"{missing}: pip install {install}") from error


def import_function(argument: str, reference: str) -> Callable[..., Any]:
    """Imports and returns the function that `reference` names as "module:function".

    Raises ConfigError, which names `argument`, if there is no such function.
    """
    module, _, name = reference.partition(":")
    if not (module and name):
        raise ConfigError(f"{argument} must be module:function, got {reference!r}")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{argument}: there is no module {error.name!r}") from error
    if not callable(function):
        raise ConfigError(f"{argument}: module {module} has no function {name!r}")
    found: Callable[..., Any] = function
    return found
