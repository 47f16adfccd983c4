"""All known families by class."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from slipstream.core.models import families
from slipstream.core.models.family import Family

# Class that config.json names -> its record.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {each.architecture: each for each in families.FAMILIES}
)
_BY_MODEL_TYPE = {each.model_type: each for each in FAMILIES.values() if each.model_type}
_UNKNOWN = Family()


def architecture_of(values: Mapping[str, Any]) -> str:
    """Returns the model's class by the table of a config.json, or "" if it has none."""
    return str((values.get("architectures") or [""])[0])


def family_of(values: Mapping[str, Any]) -> Family:
    """Returns the family by `architectures`, else by `model_type`; a plain decoder if unknown."""
    architecture = architecture_of(values)
    if architecture:
        return FAMILIES.get(architecture, _UNKNOWN)
    return _BY_MODEL_TYPE.get(str(values.get("model_type")), _UNKNOWN)
