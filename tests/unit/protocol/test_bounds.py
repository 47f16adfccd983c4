import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from slipstream.core.errors import ConfigError, ProtocolError
from slipstream.core.settings.sections import SamplingSection
from slipstream.protocol.bounds import bound_of, check_bounds, decode, max_message_bytes
from slipstream.v1 import (
    bounds_pb2,
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)
from support.fakes.small_configs import small_config
from support.rigs.counted_work import counted

FILES = (
    environment_pb2,
    fleet_pb2,
    status_pb2,
    trainer_pb2,
    trajectory_pb2,
    weights_pb2,
)
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def messages() -> list[Descriptor]:
    return [
        message
        for file in FILES
        for message in file.DESCRIPTOR.message_types_by_name.values()
    ]


def bounded_fields() -> Iterator[tuple[Descriptor, FieldDescriptor]]:
    for message in messages():
        for field in message.fields:
            bound = bound_of(field)
            # The size of the whole message ends longer ones first.
            if bound is not None and bound.max_items <= 1 << 17:
                yield message, field


def unbounded_fields(descriptors: Iterable[Descriptor]) -> list[str]:
    """The fields that must state a bound and state none, or half of one."""
    fields = (field for descriptor in descriptors for field in descriptor.fields)
    return [field.full_name for field in fields if not is_bounded(field)]


def is_bounded(field: FieldDescriptor) -> bool:
    bound = bound_of(field)
    entry = field.message_type
    is_map = entry is not None and entry.GetOptions().map_entry
    if field.is_repeated and (bound is None or not bound.max_items):
        return False
    for part in entry.fields if is_map else [field]:
        if (
            part.message_type
            or part.enum_type
            or part.type == FieldDescriptor.TYPE_BOOL
        ):
            continue
        if bound is None or not (
            bound.max_bytes
            if part.type in TEXTS
            else bound.any or bound.max > bound.min
        ):
            return False
    return True


def test_every_field_of_every_message_states_a_bound() -> None:
    assert sum(len(message.fields) for message in messages()) > 250
    assert unbounded_fields(messages()) == []


def test_a_field_without_a_bound_is_found() -> None:
    file = descriptor_pb2.FileDescriptorProto(
        name="a.proto", package="a", syntax="proto3"
    )
    message = file.message_type.add(name="New")
    kinds = ("TYPE_STRING", "TYPE_BYTES", "TYPE_UINT32", "TYPE_DOUBLE", "TYPE_BOOL")
    for number, kind in enumerate(kinds, start=1):
        field = message.field.add(
            name=f"field_{number}", number=number, label="LABEL_OPTIONAL"
        )
        field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(kind)
    repeated = message.field.add(name="many", number=9, label="LABEL_REPEATED")
    repeated.type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    repeated.options.Extensions[bounds_pb2.bound].max_bytes = 9
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    fields = unbounded_fields([pool.FindMessageTypeByName("a.New")])
    names = ("field_1", "field_2", "field_3", "field_4", "many")
    assert fields == [f"a.New.{name}" for name in names]


def test_every_request_of_a_service_states_its_largest_size() -> None:
    requests = [
        method.input_type
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(requests) > 15
    for request in requests:
        kind = message_factory.GetMessageClass(request)
        assert 0 < max_message_bytes(kind) <= 64 << 20


def beyond(message: Message, field: FieldDescriptor, bound: bounds_pb2.Bound) -> bool:
    """Puts a value outside of its bound into the field; False when no value is outside."""
    values = getattr(message, field.name)
    is_map = (
        field.message_type is not None and field.message_type.GetOptions().map_entry
    )
    if is_map:
        key = "k" * (bound.max_bytes + 1)
        values[key] = (
            "" if field.message_type.fields_by_name["value"].type in TEXTS else 0.0
        )
    elif field.is_repeated and field.message_type is not None:
        for _ in range(bound.max_items + 1):
            values.add()
    elif field.is_repeated:
        values.extend(
            [
                b""
                if field.type == FieldDescriptor.TYPE_BYTES
                else ""
                if field.type in TEXTS
                else 0
            ]
            * (bound.max_items + 1)
        )
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(message, field.name, "a" * (bound.max_bytes + 1))
    elif field.type == FieldDescriptor.TYPE_BYTES:
        setattr(message, field.name, b"a" * (bound.max_bytes + 1))
    elif bound.any:
        return False
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        setattr(message, field.name, float("nan"))
    else:
        largest = 2**32 - 1 if field.type == FieldDescriptor.TYPE_UINT32 else 2**64 - 1
        if bound.max >= largest:
            return False
        setattr(message, field.name, largest)
    return True


@pytest.mark.parametrize(
    ("message", "field"),
    [pytest.param(m, f, id=f.full_name[14:]) for m, f in bounded_fields()],
)
def test_a_value_beyond_the_bound_of_a_field_is_refused_by_name(message, field):
    empty_message = message_factory.GetMessageClass(message)()
    bound = bound_of(field)
    assert bound is not None
    if not beyond(empty_message, field, bound):
        check_bounds(empty_message)
        return
    with pytest.raises(
        ProtocolError, match=rf"^{message.name}\.{field.name}[^ ]* must "
    ):
        check_bounds(empty_message)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"group_id": "a\nb"},
            "group_id must hold ASCII letters, digits and ._:/+-, got 'a\\nb'",
        ),
        (
            {"metrics": {"a\x1b[2J": 1.0}},
            "metrics['a\\x1b[2J'] must hold one line without control characters, got 'a\\x1b[2J'",
        ),
        (
            {"metrics": {"a": math.inf}},
            "metrics['a'] must be between -1e+18 and 1e+18, got inf",
        ),
        ({"status": 17}, "status must be a value of EpisodeStatus, got 17"),
        ({"attempt": 2**32 - 1}, "attempt must be between 0 and 1e+06, got 4294967295"),
        (
            {"branches": [{}, {"share": 1e9}]},
            "branches[1].share must be between -1e+06 and 1e+06, got 1000000000.0",
        ),
        ({"generation_s": -1}, "generation_s must be between 0 and 1e+09, got -1.0"),
        (
            {"failure": {"message": "ä" * 4097}},
            "failure.message must have at most 8192 bytes, got 8194",
        ),
    ],
)
def test_what_is_out_of_bounds_is_named_with_value_and_rule(
    fields: dict, line: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_bounds(trajectory_pb2.Trajectory(**fields))
    assert str(caught.value) == f"Trajectory.{line}"


@pytest.mark.parametrize("name", SamplingSection.model_fields)
def test_a_setting_beyond_what_a_lease_may_carry_is_refused(name: str) -> None:
    field = fleet_pb2.SamplingSettings.DESCRIPTOR.fields_by_name[name]
    bound = field.GetOptions().Extensions[bounds_pb2.bound]
    too_much: Any = int(bound.max) + 1
    if field.is_repeated:
        element = "a" if field.type == field.TYPE_STRING else 1
        too_much = [element] * (bound.max_items + 1)
    sampling = {
        "max_reply_tokens": 2,
        "max_episode_tokens": 8,
        name: too_much,
    }
    with pytest.raises(ConfigError, match=rf"sampling\.{name}\b"):
        small_config(sampling=sampling)


def test_what_lies_on_its_bound_passes() -> None:
    check_bounds(trajectory_pb2.Failure(message="ä" * 4096))
    check_bounds(
        trajectory_pb2.Trajectory(reward=-1e6, attempt=1_000_000, member=65_535)
    )
    check_bounds(environment_pb2.ChatMessage(role="ユーザー", content="a\n\x1b"))


def test_a_message_too_large_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(
        ProtocolError, match="StopRunRequest must have at most 16384 bytes, got 2"
    ):
        decode(status_pb2.StopRunRequest, bytes(20_000))


def test_millions_of_empty_elements_cost_no_more_than_their_decoding() -> None:
    lines = []
    for number in (5_000, 1_000_000):
        message = trajectory_pb2.Trajectory(
            version_spans=[trajectory_pb2.VersionSpan()] * number
        )
        with (
            counted() as work,
            pytest.raises(ProtocolError, match=f"at most 4096 elements, got {number}"),
        ):
            check_bounds(message)
        lines.append(work.num_lines)
    # The elements are counted before any of them is looked at; a collection of garbage runs lines
    # too.
    assert lines[1] < 2 * lines[0]
