"""The one type for objects of Megatron and Bridge, which come without types."""

from typing import Any, TypeAlias

# An object of Megatron or transformers, which are untyped.
Megatron: TypeAlias = Any
