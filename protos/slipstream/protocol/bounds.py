"""Checks messages that arrive against the bounds that the .proto files state.

The option `(bound)` limits the values of a field, `(max_message_bytes)` the size of a message; both
are described in slipstream/v1/bounds.proto. The bounds are the same for every run. Limits that
depend on a run's settings are checked where a message is used.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from slipstream.core.errors import ProtocolError
from slipstream.protocol.release import unknown_fact
from slipstream.v1 import bounds_pb2

M = TypeVar("M", bound=Message)
# Function that checks every value of one field, and raises _OutOfBounds.
_Check = Callable[[Any], None]

# The characters that a text must not contain, and the rule in words.
_ALPHABETS = {
    bounds_pb2.Bound.NAME: (re.compile(r"[^A-Za-z0-9._:/+-]"), "ASCII letters, digits and ._:/+-"),
    bounds_pb2.Bound.LINE: (
        re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"),
        "one line without control characters",
    ),
}
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_UNSIGNED = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
)
_REALS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


class _OutOfBounds(Exception):
    """Raised if a value breaks `rule`; each caller prepends its part of the field's `path`."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self.path = ""


def check_bounds(message: Message) -> None:
    """Raises ProtocolError if a field is out of its bound; the text has field, value and rule.

    The number of elements of a list or map is checked before the elements.
    """
    try:
        _check_message(message)
    except _OutOfBounds as broken:
        raise ProtocolError(f"{message.DESCRIPTOR.name}{broken.path} {broken.rule}") from None


def decode(kind: type[M], data: bytes) -> M:
    """Returns the message of type `kind` that `data` encodes.

    Raises ProtocolError when `data` is too long, encodes no such message, or breaks a bound.
    """
    largest = max_message_bytes(kind)
    if len(data) > largest:
        raise ProtocolError(
            f"{kind.DESCRIPTOR.name} must have at most {largest} bytes, got {len(data)}"
        )
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a message of type {kind.DESCRIPTOR.name}: {error}") from None
    check_bounds(message)
    return message


def check_known(message: Message, what: str) -> None:
    """Removes what `message` has beyond its type's fields; raises ProtocolError if it had any.

    Messages on the wire come from our own release. A stored one, `what`, may come from another, and
    must not be read without the facts that it has beside ours.
    """
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() < num_bytes:
        raise ProtocolError(unknown_fact(what, "a field"))


def max_message_bytes(kind: type[Message]) -> int:
    """Returns the `max_message_bytes` of a message type, which must state one."""
    return _stated_size(kind.DESCRIPTOR)


@functools.cache
def _stated_size(descriptor: Descriptor) -> int:
    # To look at options takes longer than to decode a small message.
    options: Any = descriptor.GetOptions()
    size: int = options.Extensions[bounds_pb2.max_message_bytes]
    assert size, f"{descriptor.full_name} states no max_message_bytes"
    return size


def bound_of(field: FieldDescriptor) -> bounds_pb2.Bound | None:
    """Returns the bound that a field states, or None if it states none."""
    # The generated stubs do not know the type of an extension.
    options: Any = field.GetOptions()
    if not options.HasExtension(bounds_pb2.bound):
        return None
    bound: bounds_pb2.Bound = options.Extensions[bounds_pb2.bound]
    return bound


def largest(kind: type[Message], name: str) -> float:
    """Returns the largest value that the bound of the numeric field `name` allows."""
    # The stubs know two types of descriptors for one.
    descriptor: Any = kind.DESCRIPTOR
    bound = bound_of(descriptor.fields_by_name[name])
    assert bound is not None, f"{kind.__name__}.{name} states no bound"
    return bound.max


def _check_message(message: Message) -> None:
    checks = _checks(message.DESCRIPTOR)
    for field, value in message.ListFields():
        check = checks.get(field)
        if check is not None:
            try:
                check(value)
            except _OutOfBounds as broken:
                broken.path = f".{field.name}{broken.path}"
                raise


@functools.cache
def _checks(descriptor: Descriptor) -> dict[FieldDescriptor, _Check]:
    """Returns the check of each field, without fields whose values are always valid."""
    checks: dict[FieldDescriptor, _Check] = {}
    for field in descriptor.fields:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            checks[field] = _map_check(field, entry)
            continue
        check = _value_check(field, bound_of(field))
        if field.is_repeated:
            checks[field] = _list_check(field, check)
        elif check is not None:
            checks[field] = check
    return checks


def _list_check(field: FieldDescriptor, check_item: _Check | None) -> _Check:
    bound = bound_of(field)
    assert bound is not None, f"{field.full_name} states no bound"
    max_items = bound.max_items
    are_fine = _whole_list_check(field, bound)

    def check(values: Sequence[object]) -> None:
        _count(len(values), max_items)
        if check_item is None or (values and are_fine(values)):
            return
        for index, value in enumerate(values):
            try:
                check_item(value)
            except _OutOfBounds as broken:
                broken.path = f"[{index}]{broken.path}"
                raise

    return check


def _whole_list_check(
    field: FieldDescriptor, bound: bounds_pb2.Bound
) -> Callable[[Sequence[Any]], bool]:
    """Returns a fast test of a whole list: True only if all elements are within the bound.

    After False the elements must be checked one by one.
    """
    longest = bound.max_bytes
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda values: max(map(len, values)) <= longest
    is_number = field.message_type is None and field.enum_type is None
    if not is_number or bound.any or field.type in (*_TEXTS, *_REALS, FieldDescriptor.TYPE_BOOL):
        return lambda values: False
    lowest = int(bound.min)
    highest = int(bound.max)
    if lowest <= 0 and field.type in _UNSIGNED:
        return lambda values: max(values) <= highest
    return lambda values: lowest <= min(values) and max(values) <= highest


def _map_check(field: FieldDescriptor, entry: Descriptor) -> _Check:
    bound = bound_of(field)
    assert bound is not None, f"{field.full_name} states no bound"
    max_items = bound.max_items
    key = _value_check(entry.fields_by_name["key"], bound)
    value = _value_check(entry.fields_by_name["value"], bound)

    def check(values: Mapping[object, object]) -> None:
        _count(len(values), max_items)
        for name, content in values.items():
            try:
                if key is not None:
                    key(name)
                if value is not None:
                    value(content)
            except _OutOfBounds as broken:
                broken.path = f"[{shown(str(name))}]{broken.path}"
                raise

    return check


def _value_check(field: FieldDescriptor, bound: bounds_pb2.Bound | None) -> _Check | None:
    """Returns the check of one value of a field, or None if every value is valid."""
    if field.message_type is not None:
        return _check_message
    if (kind := field.enum_type) is not None:
        numbers = frozenset(kind.values_by_number)

        def check_enum(value: int) -> None:
            if value not in numbers:
                raise _OutOfBounds(f"must be a value of {kind.name}, got {value}")

        return check_enum
    if field.type == FieldDescriptor.TYPE_BOOL:
        return None
    assert bound is not None, f"{field.full_name} states no bound"
    if field.type in _TEXTS:
        longest = bound.max_bytes
        alphabet = _ALPHABETS.get(bound.alphabet)

        def check_text(value: str | bytes) -> None:
            size = len(value)
            # A text of n characters has n to 4 n bytes: most are known to fit without encoding.
            if 4 * size > longest and isinstance(value, str):
                size = len(value.encode())
            if size > longest:
                raise _OutOfBounds(f"must have at most {longest} bytes, got {size}")
            if alphabet is not None and isinstance(value, str) and alphabet[0].search(value):
                raise _OutOfBounds(f"must hold {alphabet[1]}, got {shown(value)}")

        return check_text
    if bound.any:
        return None
    lowest = bound.min
    highest = bound.max
    if field.type not in _REALS:
        lowest = int(lowest)
        highest = int(highest)

    def check_number(value: float) -> None:
        if not lowest <= value <= highest:
            raise _OutOfBounds(f"must be between {lowest:g} and {highest:g}, got {value}")

    return check_number


def _count(size: int, max_items: int) -> None:
    if size > max_items:
        raise _OutOfBounds(f"must have at most {max_items} elements, got {size}")


def one_line(text: str, max_characters: int) -> str:
    """Returns the text cut after `max_characters`, with control characters and line ends escaped.

    "..." marks a cut.
    """
    cut = text if len(text) <= max_characters else f"{text[:max_characters]}..."
    return _ALPHABETS[bounds_pb2.Bound.LINE][0].sub(lambda match: repr(match[0])[1:-1], cut)


def shown(text: str, max_characters: int = 100) -> str:
    """Returns the text for a log: quoted, on one line, cut after `max_characters`."""
    return repr(text if len(text) <= max_characters else f"{text[:max_characters]}...")
