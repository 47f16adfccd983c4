"""Draws values of settings from the models of the sections: every field, by its type and bounds."""

import random
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS, FunctionKind
from slipstream.extensions.by_environment.settings import EnvironmentOverrides

Changes = dict[str, JsonValue]
# The environment that may have values of its own.
OWN = "own"
OF_ENVIRONMENT = f"extensions.by_environment.environments.{OWN}."

# The arguments of their functions are drawn with these.
_WITH_FUNCTIONS = (AlgorithmSection, EnvironmentOverrides)


@dataclass(frozen=True)
class Setting:
    """A setting by its dotted name."""

    name: str
    field: FieldInfo

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_choice(self) -> bool:
        """Whether the setting has a few values, such as the names of functions."""
        annotation = self.field.annotation
        return (
            self._kind in FUNCTIONS
            or annotation is bool
            or get_origin(annotation) is typing.Literal
        )

    @property
    def _kind(self) -> str:
        """The kind of function that the setting names, of the run or of one environment."""
        for table in ("algorithm.", OF_ENVIRONMENT):
            if self.name.startswith(table):
                return self.name.removeprefix(table)
        return ""

    def draw(self, chance: random.Random) -> Changes:
        """Returns another value than the default; a function comes with arguments of its own.

        Returns nothing for a setting whose values have no bound or choice, such as a path.
        """
        if self._kind in FUNCTIONS:
            return self._function(chance, typing.cast(FunctionKind, self._kind))
        value = _value_of(self.field, chance)
        return {} if value is None else {self.name: value}

    def _function(self, chance: random.Random, kind: FunctionKind) -> Changes:
        functions = FUNCTIONS[kind]
        names = [name for name in functions if name != self.field.default]
        name = chance.choice(names)
        arguments: dict[str, JsonValue] = {}
        for key, field in functions[name].arguments.model_fields.items():
            is_drawn = field.is_required() or chance.random() < 0.5
            value = _value_of(field, chance) if is_drawn else None
            if value is not None:
                arguments[key] = value
        return {
            self.name: name,
            f"{self.name}_args": arguments,
        }


def every_setting(
    model: type[BaseModel] = Config, above: str = ""
) -> Iterator[Setting]:
    """Yields the settings of a model and of its tables, but for lists of tables."""
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from every_setting(inner, f"{above}{name}.")
        elif model not in _WITH_FUNCTIONS or not name.endswith("_args"):
            yield Setting(f"{above}{name}", field)


def environment_settings() -> Iterator[Setting]:
    """Yields the settings of an environment that has values of its own."""
    yield from every_setting(EnvironmentOverrides, OF_ENVIRONMENT)


def _value_of(field: FieldInfo, chance: random.Random) -> JsonValue:
    bounds = list(field.metadata)
    return _drawn(field.annotation, bounds, field.default, chance)


def _section_of(annotation: object) -> type[BaseModel] | None:
    """Returns the model of a table, also of one that may be left out."""
    kinds = [annotation]
    if isinstance(annotation, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    kind = kinds[0]
    is_class = isinstance(kind, type) and not get_origin(kind)
    if is_class and issubclass(kind, BaseModel):
        return kind
    return None


def _drawn(
    annotation: object,
    metadata: list[object],
    default: object,
    chance: random.Random,
) -> JsonValue:
    """Returns a value of a type within its bounds, or None if none can be drawn."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        kind, *notes = get_args(annotation)
        bounds = list(metadata)
        for note in notes:
            bounds += note.metadata if isinstance(note, FieldInfo) else [note]
        return _drawn(kind, bounds, default, chance)
    arguments = list(get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in arguments if kind is not type(None)]
        kind = chance.choice(kinds)
        return _drawn(kind, metadata, default, chance)
    if origin is typing.Literal:
        choices = [choice for choice in arguments if choice != default]
        return chance.choice(choices)
    if origin is tuple:
        parts = [kind for kind in arguments if kind is not Ellipsis]
        values: list[Any] = [_drawn(kind, [], None, chance) for kind in parts]
        return None if None in values else sorted(values)
    if annotation is bool:
        return not default
    if annotation is int:
        return int(_number(metadata, default, chance))
    if annotation is float:
        return _number(metadata, default, chance)
    return None


def _number(metadata: list[object], default: object, chance: random.Random) -> float:
    """Returns a number near the default or a bound, or between bounds."""
    low = -100.0
    high = 100.0
    for bound in metadata:
        match bound:
            case Ge(value):
                low = float(value)  # type: ignore[arg-type]
            case Gt(value):
                low = float(value)  # type: ignore[arg-type]
            case Le(value):
                high = float(value)  # type: ignore[arg-type]
            case Lt(value):
                high = float(value)  # type: ignore[arg-type]
    high = max(high, low + 1)
    usual = low + 1
    if isinstance(default, int | float):
        usual = float(default)
    candidates = [
        low,
        low + 1,
        usual / 2,
        usual * 2,
        usual + 1,
        chance.uniform(low, min(high, 8)),
    ]
    values = [value for value in candidates if low <= value <= high]
    other_values = [value for value in values if value != default]
    return chance.choice(other_values)
