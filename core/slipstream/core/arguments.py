"""Checks the arguments of functions that users call, by the types in the functions' signatures."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from slipstream.core.errors import ConfigError
from slipstream.core.template_values import plain, show

Function = TypeVar("Function", bound=Callable[..., Any])

# Counts are sent in 32 bits, and clocks of threads wait for at most 30 years.
Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNegative: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
AboveZero: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
# A limit of a wait, which may be infinite.
Patience: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=True)]

# Our words in place of pydantic's, by the types of its errors.
_WORDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "sequence_str": "a list",
    "greater_than_equal": "at least {ge:.12g}",
    "greater_than": "above {gt:.12g}",
    "less_than_equal": "at most {le:.12g}",
}
# Texts that can be sent and opened.
_WHOLE = re.compile(r"[^\0\ud800-\udfff]*")
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


def checked(function: Function) -> Function:
    """Returns `function`, which raises ConfigError for an argument that its signature excludes.

    The error names the argument, the rule and the value. What a scalar of numpy or of torch holds
    is passed on in its place. Names and number of the arguments are left to the function.
    """

    def checked_call(*args: object, **keywords: object) -> Any:  # noqa: ANN401 - the function's result
        kinds = _kinds(function)
        listed = dict(zip(kinds, args, strict=False))
        for name in keywords.keys() & kinds.keys():
            keywords[name] = of_kind(name, keywords[name], kinds[name])
        plain_args = [of_kind(name, listed[name], kinds[name]) for name in listed]
        return function(*plain_args, *args[len(listed) :], **keywords)

    async def awaited(*args: object, **keywords: object) -> object:
        return await checked_call(*args, **keywords)

    is_async = inspect.iscoroutinefunction(function)
    return cast(Function, functools.wraps(function)(awaited if is_async else checked_call))


@functools.cache
def _kinds(function: Callable[..., object]) -> dict[str, TypeAdapter[Any]]:
    """Returns the types of a function's arguments in their order; Any for one without a type."""
    # Not before the first call: some names are known at the end of their module.
    hints = typing.get_type_hints(function, include_extras=True)
    kinds: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for options in typing.get_args(hints.get(name)):
                kinds |= typing.get_type_hints(options, include_extras=True)
        else:
            kinds[name] = hints.get(name, Any)
    return {name: kind_of(kind) for name, kind in kinds.items()}


def kind_of(form: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a type, or a form of typing
    """Returns the check of a type, which converts nothing."""
    return TypeAdapter(form, config=_STRICT)


def of_kind(name: str, value: object, kind: TypeAdapter[Any]) -> Any:  # noqa: ANN401 - of any kind
    """Returns the plain `value`; raises ConfigError, which begins with `name`, for another type."""
    value = plain(value)
    if isinstance(value, str | Path) and not _WHOLE.fullmatch(str(value)):
        raise ConfigError(f"{name} must be without surrogates and NUL, got {show(value)}")
    try:
        kind.validate_python(value)
    except ValidationError as error:
        errors = error.errors()
        rules = dict.fromkeys(_rule(fault) for fault in errors)
        place = "".join(f", number {part + 1}," for part in errors[0]["loc"] if type(part) is int)
        rule = f"{name}{place} must be {' or '.join(rules)}"
        raise ConfigError(f"{rule}, got {show(errors[0]['input'])}") from None
    return value


def _rule(error: ErrorDetails) -> str:
    words = _WORDS.get(error["type"], "")
    return words.format(**error.get("ctx", {})) or error["msg"].removeprefix("Input should be ")
