"""The experts to which a model sent each token of an episode, and their wire form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from slipstream.core.errors import ProtocolError

ExpertArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

# The most experts whose ids fit one byte, where the largest value means "not recorded".
_ONE_BYTE = 255
_TWO_BYTES = 65535


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of each token, layer by layer.

    `expert_ids` is [tokens, layers, experts per token]: uint8 with up to 255 experts, else uint16.
    The order within a token and layer has no meaning. The largest value of the type means "not
    recorded".
    """

    expert_ids: ExpertArray
    num_experts: int

    @classmethod
    def of_parts(
        cls, parts: Sequence[npt.NDArray[np.unsignedinteger]], num_experts: int, *, num_tokens: int
    ) -> RoutedExperts:
        """Joins parts of consecutive tokens from the first on; later tokens are not recorded."""
        dtype = expert_dtype(num_experts)
        recorded = np.concatenate(parts).astype(dtype)
        missing = num_tokens - len(recorded)
        assert missing >= 0, f"experts of {len(recorded)} tokens for {num_tokens}"
        rest = np.full((missing, *recorded.shape[1:]), np.iinfo(dtype).max, dtype=dtype)
        return cls(np.concatenate([recorded, rest]), num_experts)

    @property
    def is_recorded(self) -> npt.NDArray[np.bool_]:
        """One flag for each token: the experts of all its layers are recorded."""
        missing = np.iinfo(self.expert_ids.dtype).max
        return (self.expert_ids != missing).all(axis=(1, 2))  # type: ignore[no-any-return]

    def pack(self) -> bytes:
        """Returns the ids row by row, little endian."""
        return self.expert_ids.astype(self.expert_ids.dtype.newbyteorder("<")).tobytes()


def expert_dtype(num_experts: int) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
    """Returns the element type for the ids of `num_experts`. Raises ProtocolError for too many."""
    if num_experts > _TWO_BYTES:
        raise ProtocolError(f"experts must be at most {_TWO_BYTES}, got {num_experts}")
    return np.dtype(np.uint8) if num_experts <= _ONE_BYTE else np.dtype(np.uint16)


def unpack_experts(
    data: bytes, *, num_tokens: int, num_layers: int, top_k: int, num_experts: int
) -> RoutedExperts:
    """Reverses `pack`. Raises ProtocolError for a wrong size and for an unknown expert."""
    dtype = expert_dtype(num_experts)
    expected = num_tokens * num_layers * top_k * dtype.itemsize
    is_possible = 1 <= top_k <= num_experts and 1 <= num_layers <= _TWO_BYTES
    if len(data) != expected or not is_possible:
        raise ProtocolError(
            f"experts of {num_tokens} tokens, {num_layers} layers, {top_k} of {num_experts} each, "
            f"must have {expected} bytes, got {len(data)}"
        )
    ids: ExpertArray = np.frombuffer(data, dtype=np.uint8)
    if dtype != np.uint8:
        ids = np.frombuffer(data, dtype="<u2").astype(np.uint16, copy=False)
    unknown = (ids >= num_experts) & (ids != np.iinfo(dtype).max)
    if unknown.any():
        raise ProtocolError(f"expert {ids[unknown][0]} of {num_experts} experts")
    return RoutedExperts(ids.reshape(num_tokens, num_layers, top_k), num_experts)


def routing_bytes_per_token(num_layers: int, top_k: int, num_experts: int) -> int:
    """Returns the bytes of one token's experts on the wire."""
    return num_layers * top_k * expert_dtype(num_experts).itemsize
