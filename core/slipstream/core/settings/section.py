"""The base of all sections of a run's settings, and the types of their fields."""

import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from slipstream.core.machine.address import address_parts

REFERENCE_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def _check_reference_form(reference: str) -> str:
    if REFERENCE_FORM.fullmatch(reference) is None:
        raise ValueError(f"a reference is package.module:Class, got {reference!r}")
    return reference


def check_one_of(
    built_in: Collection[str], added: Callable[[], Collection[str]]
) -> BeforeValidator:
    """Returns a validator for a name out of `built_in`, or of those that extensions add.

    Extensions are looked for only if the name is not built in. The error is that of a `Literal`.
    """

    def check(name: object) -> object:
        if name in built_in:
            return name
        names = list(dict.fromkeys([*built_in, *added()]))
        if name in names:
            return name
        expected = ", ".join(map(repr, names[:-1]))
        expected += f" or {names[-1]!r}"
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        )

    return BeforeValidator(check)


# Types of the numbers of a model.
ElementType = Literal["float32", "bfloat16", "float16"]
Reference = Annotated[str, AfterValidator(_check_reference_form)]
Address = Annotated[str, AfterValidator(lambda address: address_parts(address) and address)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
# Limit of a silence, at least 1 s: a busy process may be silent for most of a second.
Silence = Annotated[float, Field(ge=1)]

# Counts travel in 32 bits and go into kernels that use 32 bits. Bytes use 64 bits.
_LARGEST_COUNT = 2**31 - 1
_LARGEST_BYTES = 2**63 - 1
# A shorter wait would be a busy loop. The longest wait, 30 years, fits clocks of threads and torch.
_SHORTEST_S = 1e-3
_LONGEST_S = 1e9
# Far below the largest float32, the type in which most numbers are used.
_LARGEST = 1e30
# Limits of Linux for one name and for a whole path.
_NAME_BYTES = 255
_PATH_BYTES = 4095


@dataclass(frozen=True)
class Fixed:
    """Marks a setting that must keep its value when a run goes on, for this reason."""

    reason: str


@dataclass(frozen=True)
class Growing:
    """Marks a setting that must not become smaller when a run goes on, for this reason."""

    reason: str


class Section(BaseModel):
    """The base of a section: it refuses unknown keys, and its values never change.

    Numbers must be finite, not true or false, and small enough to be sent or waited for. Texts and
    paths must not be empty.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object, info: ValidationInfo) -> object:
        """Refuses values that pydantic would convert, and texts that cannot be names or paths."""
        name = info.field_name or ""
        kinds = set(_kinds(cls.model_fields[name].annotation))
        if kinds & {int, float} and bool not in kinds and isinstance(value, bool):
            raise ValueError(f"input should be a number, got {str(value).lower()}")
        if kinds & {str, Path} and isinstance(value, str):
            if not value or not value.isprintable():
                # A URL may hold a password.
                shown = "" if name.endswith("_url") else f", got {value!r}"
                raise ValueError(f"input should be one line of text, not empty{shown}")
            if (Path in kinds or name == "storage_url") and value[0] in "~$":
                # Otherwise a folder named "~" would be made here.
                raise ValueError(f"input should be a path without ~ or $ in front, got {value!r}")
            path = os.fsencode(value)
            longest_name = max(map(len, path.split(b"/")))
            if Path in kinds and (len(path) > _PATH_BYTES or longest_name > _NAME_BYTES):
                raise ValueError(
                    f"input should be a path of at most {_PATH_BYTES} bytes and {_NAME_BYTES} for "
                    f"each of its names, got {len(value)} characters"
                )
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _check_size(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        if isinstance(value, float) and abs(value) > _LARGEST:
            raise ValueError(f"input should be at most {_LARGEST:g}, got {value:g}")
        is_time = value == 0 or (isinstance(value, float) and _SHORTEST_S <= value <= _LONGEST_S)
        if isinstance(value, float) and name.endswith("_s") and not is_time:
            raise ValueError(
                f"input should be {_SHORTEST_S:g} to {_LONGEST_S:g} seconds, got {value:g}"
            )
        largest = _LARGEST_BYTES if name.endswith("_bytes") else _LARGEST_COUNT
        if isinstance(value, int) and value > largest:
            raise ValueError(f"input should be at most {largest}, got {value}")
        return value


def _kinds(annotation: object) -> Iterator[object]:
    """Yields the types of a field's value, without the types of its items."""
    if typing.get_origin(annotation) is Annotated:
        yield from _kinds(typing.get_args(annotation)[0])
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _kinds(argument)
    else:
        yield annotation
