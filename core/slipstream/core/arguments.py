"""Checks the arguments of functions that users call, by the types in the functions' signatures."""

import functools
import inspect
import itertools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, cast

from slipstream.core.errors import ConfigError
from slipstream.core.template_values import plain, show

Function = TypeVar("Function", bound=Callable[..., Any])

# Numbers up to these can be sent; clocks of threads cannot wait longer.
_LARGEST_WHOLE, _LARGEST, _LONGEST_S = 2**63 - 1, 1e30, 1e9
# Kinds of values: each in words, and its classes.
_KINDS: dict[object, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    bool: ("True or False", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bytes: ("bytes", (bytes,)),
    Path: ("a path", (Path,)),
    Mapping: ("a mapping", (Mapping,)),
    Sequence: ("a list", (Sequence,)),
    types.NoneType: ("None", (types.NoneType,)),
}


def within(least: float, most: float = _LARGEST) -> Callable[[float], str]:
    """Returns the rule of numbers from `least` to `most`."""

    def rule(value: float) -> str:
        if value < least:
            return f"at least {least}"
        return f"at most {most}" if value > most else ""

    return rule


def _above_0(value: float) -> str:
    return within(-math.inf, _LONGEST_S)(value) if value > 0 else "above 0"


# Counts are sent in 32 bits.
Count: TypeAlias = Annotated[int, within(1, 2**31 - 1)]
AboveZero: TypeAlias = Annotated[float, _above_0]
# What may stand in the header of a call.
Identity: TypeAlias = Annotated[
    str, lambda text: "" if text.isascii() and text.isprintable() else "one line of ASCII"
]
# A limit of a wait, which may be infinite.
Patience: TypeAlias = Annotated[float, within(0, math.inf)]


def checked(function: Function) -> Function:
    """Returns `function`, which raises ConfigError for an argument that its signature excludes.

    The error names the argument, the rule and the value. What a scalar of numpy or of torch holds
    is passed on in its place. Abstract types that are not in `_KINDS` are left to the function, as
    are the names and the number of arguments.
    """

    def called(args: Sequence[object], named: Mapping[str, object]) -> Any:  # noqa: ANN401 - its result
        def given(name: str, value: object) -> Any:  # noqa: ANN401 - of any kind
            return of_kind(name, value, _kinds(function).get(name, Any))

        names = itertools.chain(_kinds(function), itertools.repeat(""))
        listed = [given(name, value) for name, value in zip(names, args, strict=False)]
        return function(*listed, **{name: given(name, value) for name, value in named.items()})

    async def awaited(*args: object, **named: object) -> object:
        return await called(args, named)

    def call(*args: object, **named: object) -> object:
        return called(args, named)

    is_async = inspect.iscoroutinefunction(function)
    return cast(Function, functools.wraps(function)(awaited if is_async else call))


@functools.cache
def _kinds(function: Callable[..., object]) -> dict[str, Any]:
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
    return kinds


def of_kind(name: str, value: object, kind: Any) -> Any:  # noqa: ANN401 - of any kind
    """Returns the plain `value`; raises ConfigError, which begins with `name`, for another type."""
    value = plain(value)
    if rule := _broken(value, kind):
        raise ConfigError(f"{name} must be {rule}, got {show(value)}")
    return value


def _broken(value: object, kind: Any) -> str:  # noqa: ANN401 - a type, or a form of typing
    """Returns what a value of the type `kind` must be, or "" if `value` is one."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Annotated:
        return _broken(value, parts[0]) or str(parts[1](value))
    if origin in (typing.Union, types.UnionType):
        rules = [_broken(value, each) for each in parts]
        return " or ".join(rule for rule in rules if rule != "None") if all(rules) else ""
    if origin is typing.Literal:
        is_one = any(type(value) is type(each) and value == each for each in parts)
        return "" if is_one else f"one of {', '.join(map(str, parts))}"
    is_abstract = origin is Any or not isinstance(origin, type) or inspect.isabstract(origin)
    if is_abstract and origin not in _KINDS:
        return ""
    words, classes = _KINDS.get(origin) or (f"of the class {origin.__name__}", (origin,))
    # In Python True is a number, and a text is a list.
    others = {bool: (), Sequence: (str, bytes)}.get(origin, (bool,))
    is_one = isinstance(value, classes) and not isinstance(value, others)
    if parts and (rule := _broken(object(), parts[-1])):
        words = f"{words}, each {'value' if origin is Mapping else 'item'} {rule}"
        items = value.values() if isinstance(value, Mapping) else value
        is_one = is_one and not any(_broken(plain(item), parts[-1]) for item in cast(Any, items))
    if not is_one or value != value:
        return words
    if isinstance(value, int):
        return within(-_LARGEST_WHOLE, _LARGEST_WHOLE)(value)
    if isinstance(value, str | Path) and ("\0" in str(value) or not _is_unicode(str(value))):
        return f"{words} without surrogates and NUL"
    return ""


def _is_unicode(text: str) -> bool:
    return text == text.encode(errors="ignore").decode()
