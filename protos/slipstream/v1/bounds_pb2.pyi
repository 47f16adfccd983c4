from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
BOUND_FIELD_NUMBER: _ClassVar[int]
bound: _descriptor.FieldDescriptor
MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
max_message_bytes: _descriptor.FieldDescriptor

class Bound(_message.Message):
    __slots__ = ("max_bytes", "alphabet", "max_items", "min", "max", "any")
    class Alphabet(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TEXT: _ClassVar[Bound.Alphabet]
        LINE: _ClassVar[Bound.Alphabet]
        NAME: _ClassVar[Bound.Alphabet]
    TEXT: Bound.Alphabet
    LINE: Bound.Alphabet
    NAME: Bound.Alphabet
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALPHABET_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    ANY_FIELD_NUMBER: _ClassVar[int]
    max_bytes: int
    alphabet: Bound.Alphabet
    max_items: int
    min: float
    max: float
    any: bool
    def __init__(self, max_bytes: _Optional[int] = ..., alphabet: _Optional[_Union[Bound.Alphabet, str]] = ..., max_items: _Optional[int] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., any: bool = ...) -> None: ...
