"""The trainer ranks, which hold parameters, optimizer and policy version, and send new weights."""

from typing import Any, TypeAlias

# An object of Megatron, Bridge or transformers, which come without types.
Megatron: TypeAlias = Any
