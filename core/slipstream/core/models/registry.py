"""All known families by class, and the decoders that are part of a model with images.

Gemma 3 and Mistral 3 have a vision tower, and a decoder that is a text class of its own. The
programs treat such a folder as a model of its text class, with other tensor names.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.models import families
from slipstream.core.models.family import Family

# Class that config.json names -> its record.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {each.architecture: each for each in families.FAMILIES}
)
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
    """Returns the family by `architectures`, else by `model_type`; a plain decoder if unknown."""
    architecture = architecture_of(values)
    if architecture:
        return FAMILIES.get(architecture, _UNKNOWN)
    return _BY_MODEL_TYPE.get(str(values.get("model_type")), _UNKNOWN)


# Beginnings of the names of tensors outside the decoder, in both naming schemes.
TOWERS = tuple(
    f"{outer}{part}."
    for outer in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)
_NEW_FORM = "model.language_model."


def nested_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the decoder's table of a class in `NESTED`, with `vision_config`.

    Raises ConfigError for an unknown decoder and for unusable fields.
    """
    outer, decoder = architecture_of(values), values.get("text_config")
    kinds = NESTED[outer]
    for name in ("text_config", "vision_config"):
        if not (isinstance(values.get(name), Mapping) and values[name]):
            raise ConfigError(
                f"model.path: {name} of a {outer} must be a table, got {values.get(name)!r}"
            )
    assert isinstance(decoder, Mapping)
    kind = decoder.get("model_type", next(iter(kinds)))
    if kind not in kinds:
        raise ConfigError(
            f"model.path: model_type in text_config of a {outer} must be {' or '.join(kinds)}, "
            f"got {kind!r}"
        )
    architecture = kinds[kind]
    nested = FAMILIES[architecture].nested
    assert nested is not None
    table = {**nested.defaults, **decoder}
    if values.get("tie_word_embeddings") is False and table.get("tie_word_embeddings"):
        raise ConfigError(
            "model.path: tie_word_embeddings must be the same in config.json and its text_config, "
            "got false and true: transformers reads the one, rollout servers the other"
        )
    # Files with a projection of their own are not tied, whatever the outer field's default says.
    others = {name: value for name, value in values.items() if name != "tie_word_embeddings"}
    del others["text_config"]
    return {**others, **table, "architectures": [architecture]}


def is_nested(values: Mapping[str, Any]) -> bool:
    """Whether `values` comes from `nested_table`, so that the decoder is part of a vision model."""
    return bool(values.get("vision_config")) and family_of(values).nested is not None


def nested_name(name: str, held: Collection[str]) -> str:
    """Returns the name of a decoder's tensor in the files of a vision model (a class in `NESTED`).

    `name` is the tensor's name in the decoder's text class. `held` has the names of all tensors in
    the files, which show the naming scheme.
    """
    if any(each.startswith(_NEW_FORM) for each in held):
        return name.replace("model.", _NEW_FORM, 1)
    return f"language_model.{name}"
