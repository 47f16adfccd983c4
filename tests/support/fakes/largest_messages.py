"""The largest messages that the bounds of the protocol allow, each in another place.

For every field that may hold much, at any depth, one message in which it holds all that it may: as
many elements, or as long a text, as its bound and the size of the whole message allow.
"""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from slipstream.protocol.bounds import bound_of, max_message_bytes

from support.rigs.fuzzing import new

Path = tuple[FieldDescriptor, ...]
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
DEPTH = 5


def largest(kind: Descriptor, most_bytes: int = 0) -> Iterator[tuple[str, Message]]:
    """The name of a field and the message that is full of it, for all fields that hold much.

    Lists of texts come twice: with the longest, and with more and empty ones.
    """
    limit = most_bytes or max_message_bytes(type(new(kind)))
    for path in paths(kind):
        name = ".".join(field.name for field in path)
        yield name, _full(kind, path, limit)
        if path[-1].is_repeated and path[-1].type in TEXTS:
            yield f"{name}, empty", _full(kind, path, limit, is_empty=True)


def paths(kind: Descriptor, before: Path = ()) -> Iterator[Path]:
    """The ways to all fields that may hold much."""
    if len(before) == DEPTH:
        return
    for field in kind.fields:
        inner, path = field.message_type, (*before, field)
        is_map = inner is not None and inner.GetOptions().map_entry
        if field.is_repeated or field.type in TEXTS:
            yield path
        if inner is not None and not is_map:
            yield from paths(inner, path)


def _full(kind: Descriptor, path: Path, limit: int, *, is_empty: bool = False) -> Message:
    field, *below = path
    message, bound = new(kind), bound_of(field)
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        assert bound is not None
        texts = inner.fields_by_name["value"].type in TEXTS
        size = min(bound.max_bytes, max(1, limit // bound.max_items - 16))
        for number in range(min(bound.max_items, limit // (size + 20))):
            name = f"{number:07d}".ljust(size, "x")[:size] if size >= 7 else str(number)
            getattr(message, field.name)[name] = "" if texts else 0.5
    elif field.is_repeated:
        assert bound is not None
        if below:
            element: object = _full(inner, tuple(below), limit, is_empty=is_empty)
        else:
            element = _element(field, 0 if is_empty else limit)
        size = element.ByteSize() if isinstance(element, Message) else _size(element)
        # Eight bytes for the tag and the length at most, two where there is nothing in it.
        count = max(1, min(bound.max_items, limit // (size + (8 if size > 100 else 2))))
        getattr(message, field.name).extend([element] * count)
    elif inner is not None:
        getattr(message, field.name).CopyFrom(
            _full(inner, tuple(below), limit - 16, is_empty=is_empty)
        )
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _element(field, limit - 16))
    return message


def _element(field: FieldDescriptor, limit: int) -> object:
    """The longest text, the number with the most bytes, or an empty message."""
    bound = bound_of(field)
    if field.message_type is not None:
        return new(field.message_type)
    assert bound is not None
    if field.type in TEXTS:
        size = min(bound.max_bytes, limit)
        return "x" * size if field.type == FieldDescriptor.TYPE_STRING else b"x" * size
    if field.enum_type is not None:
        return max(field.enum_type.values_by_number)
    return bound.max if field.type == FieldDescriptor.TYPE_DOUBLE else int(bound.max)


def _size(value: object) -> int:
    return max(len(value), 1) if isinstance(value, str | bytes) else 10
