"""All known families, found in the modules of `families`."""

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slipstream.core.models import families
from slipstream.core.models.family import Family


def _found() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return {each.architecture: each for module in modules for each in module.FAMILIES}


# Class that config.json names -> its record.
FAMILIES: Mapping[str, Family] = MappingProxyType(_found())
# Class of a folder with a nested decoder -> class of its decoder by text_config's model_type; the
# first is the default.
NESTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        outer: {
            each.nested.model_type: each.architecture
            for each in FAMILIES.values()
            if each.nested is not None and each.nested.outer == outer
        }
        for outer in sorted({each.nested.outer for each in FAMILIES.values() if each.nested})
    }
)
_BY_MODEL_TYPE = {each.model_type: each for each in FAMILIES.values() if each.model_type}
_UNKNOWN = Family()


def architecture_of(values: Mapping[str, Any]) -> str:
    """Returns the model's class by the table of a config.json, or "" if it has none."""
    return str((values.get("architectures") or [""])[0])


def family_of(values: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json, or of its decoder's part, which may name no class.

    A model of an unknown class has the record of a plain decoder without a name.
    """
    architecture = architecture_of(values)
    if architecture:
        return FAMILIES.get(architecture, _UNKNOWN)
    return _BY_MODEL_TYPE.get(str(values.get("model_type")), _UNKNOWN)
