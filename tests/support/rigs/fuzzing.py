"""Messages and bytes that no part of ours would send, from a seeded generator.

`wild` fills fields with whatever their type holds, `bounded` keeps to the bounds that the fields
state and likes their edges, `mutated` damages bytes. All are fast: a long run makes a million.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from slipstream.protocol.bounds import bound_of
from slipstream.v1 import (
    bounds_pb2,
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)

FILES = (
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)
INTEGERS = (0, 1, 2, 5, 77, 2**16, 2**31 - 1, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
NUMBERS = (0.0, 1.0, -1.0, 0.5, -0.0, 1e308, -1e308, 1e6, 1e18, 5e-324) + tuple(
    map(float, ("nan", "inf", "-inf"))
)
TEXTS = (
    "",
    "e",
    "g000001",
    "fake",
    "a\nb",
    "\x1b[2J",
    "..",
    "../../x",
    "\u00e4" * 150,
    "x" * 10_000,
    "[" * 500,
    '{"a": 1}',
    "1e999",
    "\x00",
    "\u2028",
    "%s%n{0}",
)
DEPTH = 3
# Bytes that a mutation puts into the bytes of a message.
SPLICES = (
    b"",
    b"\x00",
    b"\xff" * 10,
    b"\x80" * 9 + b"\x02",
    b"\x0a\xff\xff\xff\x7f",
    b"\n",
    b"{}",
)

Scalar = Callable[[FieldDescriptor, random.Random], object]


def methods() -> list[MethodDescriptor]:
    """All methods that the controller answers."""
    return [
        method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if service.name != "WorkerService"
    ]


def new(kind: Descriptor) -> Message:
    return message_factory.GetMessageClass(kind)()


def wild(kind: Descriptor, draw: random.Random) -> Message:
    """A message with values from outside and inside of the bounds."""
    message = new(kind)
    _fill(message, draw, wild_scalar)
    return message


def bounded(
    kind: Descriptor, draw: random.Random, words: Sequence[str] = ()
) -> Message:
    """A message within its bounds; `words` are texts that mean something to the receiver."""
    message = new(kind)
    _fill(message, draw, partial(bounded_scalar, words=words))
    return message


def nearly(
    message: Message,
    draw: random.Random,
    words: Sequence[str] = (),
    *,
    wild_share: float = 0.3,
) -> Message:
    """An honest message in which one to three fields, somewhere, have another value."""
    changed = new(message.DESCRIPTOR)
    changed.CopyFrom(message)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        inner = changed
        while True:
            set_fields = [f for f, _ in inner.ListFields() if is_plain_message(f)]
            if not set_fields or draw.random() < 0.3:
                break
            inner = getattr(inner, draw.choice(set_fields).name)
        if not inner.DESCRIPTOR.fields:
            continue
        field = draw.choice(inner.DESCRIPTOR.fields)
        inner.ClearField(field.name)
        scalar = (
            wild_scalar
            if draw.random() < wild_share
            else partial(bounded_scalar, words=words)
        )
        _fill_field(inner, field, draw, scalar, 1)
    return changed


def is_plain_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated


def random_request(
    kind: Descriptor, draw: random.Random, words: Sequence[str] = ()
) -> bytes:
    """Bytes for a method that takes messages of a type."""
    way = draw.random()
    if way < 0.1:
        return draw.randbytes(draw.choice((0, 1, 10, 1000)))
    message = wild(kind, draw) if way < 0.5 else bounded(kind, draw, words)
    data = message.SerializePartialToString()
    return mutated(data, draw) if draw.random() < 0.25 else data


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to three changes: a bit, a slice that goes, comes twice or moves."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 3))):
        size = len(changed)
        begin = draw.randrange(size + 1)
        end = min(size, begin + draw.choice((1, 2, 8, 64, size)))
        match draw.randrange(6):
            case 0 if size:
                changed[draw.randrange(size)] ^= 1 << draw.randrange(8)
            case 1:
                del changed[begin:end]
            case 2:
                changed[begin:begin] = changed[begin:end]
            case 3:
                changed[begin:end] = draw.choice(SPLICES)
            case 4:
                changed[begin:end] = draw.randbytes(end - begin)
            case _:
                changed[begin:begin] = draw.choice(SPLICES)
    return bytes(changed)


def wild_scalar(field: FieldDescriptor, draw: random.Random) -> object:
    kind = field.type
    if kind == FieldDescriptor.TYPE_STRING:
        return draw.choice(TEXTS)
    if kind == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 4, 8, 400)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return draw.choice(NUMBERS)
    if kind == FieldDescriptor.TYPE_ENUM:
        return draw.choice((0, 1, 2, 3, 4, 5, 99, -1))
    return _fitting(field, draw.choice(INTEGERS))


def bounded_scalar(
    field: FieldDescriptor, draw: random.Random, words: Sequence[str] = ()
) -> object:
    """A value that the bound of a field allows, often on its edge."""
    return _within(field, bound_of(field), draw, words)


def _within(
    field: FieldDescriptor,
    bound: bounds_pb2.Bound | None,
    draw: random.Random,
    words: Sequence[str],
) -> object:
    if field.enum_type is not None:
        return draw.choice(list(field.enum_type.values_by_number))
    if field.type == FieldDescriptor.TYPE_BOOL or bound is None:
        return draw.random() < 0.5
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text(bound, draw, words)
    if field.type == FieldDescriptor.TYPE_BYTES:
        size = draw.choice((0, 1, 4, 16, 64, 400))
        return draw.randbytes(min(size, bound.max_bytes))
    if bound.any:
        return wild_scalar(field, draw)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        inside = (bound.min, bound.max, bound.min / 2 + bound.max / 2, 0.0, 1.0, 5e-324)
        return min(max(draw.choice(inside), bound.min), bound.max)
    lowest = int(bound.min)
    highest = int(bound.max)
    inside = (
        lowest,
        highest,
        highest - 1,
        (lowest + highest) // 2,
        lowest + 1,
        lowest + 7,
        1,
        2,
    )
    return _fitting(field, min(max(draw.choice(inside), lowest), highest))


def _text(bound: bounds_pb2.Bound, draw: random.Random, words: Sequence[str]) -> str:
    if words and draw.random() < 0.6:
        return draw.choice(words)[: bound.max_bytes]
    size = draw.choice((0, 1, 7, min(bound.max_bytes, 400)))
    if bound.alphabet == bounds_pb2.Bound.NAME:
        return "".join(draw.choices("abz09._:/+-", k=size))
    letters = "ab \u00e4\u30e6{}[]\"'\\" + ("" if bound.alphabet else "\n\x1b\x00")
    return (
        "".join(draw.choices(letters, k=size))
        .encode()[: bound.max_bytes]
        .decode(errors="ignore")
    )


def _fitting(field: FieldDescriptor, value: int) -> int:
    narrow = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
    if field.type in narrow:
        return min(value, 2**32 - 1)
    return min(
        value, 2**63 - 1 if field.type == FieldDescriptor.TYPE_SINT64 else 2**64 - 1
    )


def _fill(
    message: Message, draw: random.Random, scalar: Scalar, depth: int = 0
) -> None:
    name = ""
    if message.DESCRIPTOR.oneofs:
        # Only one field of a oneof counts, so one is filled; now and then none.
        names = [
            field.name for oneof in message.DESCRIPTOR.oneofs for field in oneof.fields
        ]
        name = draw.choice(names) if draw.random() < 0.97 else ""
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None:
            if field.name == name:
                _fill_field(message, field, draw, scalar, depth)
        elif draw.random() < 0.6 and (depth <= DEPTH or field.message_type is None):
            _fill_field(message, field, draw, scalar, depth)


def _fill_field(
    message: Message,
    field: FieldDescriptor,
    draw: random.Random,
    scalar: Scalar,
    depth: int,
) -> None:
    entry = field.message_type
    values = getattr(message, field.name)
    if entry is not None and entry.GetOptions().map_entry:
        bound = bound_of(field)
        for _ in range(draw.choice((0, 1, 3))):
            if scalar is wild_scalar:
                key = scalar(entry.fields_by_name["key"], draw)
                values[key] = scalar(entry.fields_by_name["value"], draw)
            else:
                key = _within(entry.fields_by_name["key"], bound, draw, ())
                values[key] = _within(entry.fields_by_name["value"], bound, draw, ())
    elif field.is_repeated:
        for _ in range(draw.choice((0, 1, 1, 3, 6) if depth < DEPTH else (0, 1))):
            if entry is not None:
                _fill(values.add(), draw, scalar, depth + 1)
            else:
                values.append(scalar(field, draw))
    elif entry is not None:
        values.SetInParent()
        _fill(values, draw, scalar, depth + 1)
    else:
        setattr(message, field.name, scalar(field, draw))
