"""The trainer ranks: they hold parameters and optimizer, train batches and send new weights."""

from typing import Any, TypeAlias

# An object of Megatron, Bridge or transformers, which come without types.
Megatron: TypeAlias = Any
