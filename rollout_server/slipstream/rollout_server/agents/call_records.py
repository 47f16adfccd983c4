"""The record of an episode's answered calls, from which a program that starts anew is answered.

An episode whose program, worker, server or controller was lost is played again from its beginning.
The program's calls are compared with the record by what they ask for, not by their order, since a
program may have several calls open at a time. A call of the record gets the reply that was sampled
for it, and its client gets the same bytes as before; all other calls are sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from slipstream.core.models.images import PlacedImage
from slipstream.rollout_server.agents.conversations import ConversationBranch
from slipstream.rollout_server.engine_interface import Generation

# Fields of a request that no answer depends on, and that programs fill with names of their own.
NOT_COMPARED = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class EpisodeName:
    """One attempt at a member of a group, by the epoch of its server."""

    group_id: str
    member: int
    attempt: int
    server_epoch: int


@dataclass(frozen=True, eq=False)
class CallRecord:
    """A call that was answered whole.

    `experts_from` is the index in the call's branch of the first token whose experts `generation`
    has. `is_cut` says that a limit of the run ended the reply. `reply` is the reply as a message of
    OpenAI's chat completions; `status`, `headers` and `body` are the HTTP answer.
    """

    request_digest: bytes
    prompt_digest: bytes
    generation: Generation
    experts_from: int
    is_cut: bool
    reply: Mapping[str, Any]
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class CallRecords(Protocol):
    """Keeps the answered calls of episodes where the loss of this server does not reach them.

    The methods raise ServiceFailed for an attempt whose lease is over, which would be sampled in
    vain, and where no calls can be kept.
    """

    async def begin(self, episode: EpisodeName, *, anew: bool) -> Sequence[CallRecord]:
        """Returns the kept calls of the episode's earlier attempts; forgets them if it is `anew`.

        Waits for a controller that is away.
        """

    async def keep(self, episode: EpisodeName, call: int, record: CallRecord) -> None:
        """Keeps call number `call` of an attempt; returns once a kill -9 does not lose it.

        Waits for a controller that is away. A call whose wait is cancelled is kept later.
        """


# Keeps a call of one episode by its number.
KeepCall = Callable[[int, CallRecord], Awaitable[None]]


class EpisodeRecord:
    """The calls of one attempt: those that earlier attempts left, and those that it adds."""

    def __init__(self, keep: KeepCall, records: Iterable[CallRecord] = ()) -> None:
        self._keep = keep
        self._unused = list(records)
        self.num_kept = 0
        self.num_recovered = 0
        self.num_recovered_tokens = 0
        self._num_dropped = 0

    @property
    def num_unasked(self) -> int:
        """The calls of earlier attempts that the program did not ask for again."""
        return self._num_dropped + len(self._unused)

    def take(self, request_digest: bytes) -> CallRecord | None:
        """Takes the first unused call that asked for the same, or returns None.

        Calls of a course that the program does not take again stay unused, and are not trained.
        """
        for place, record in enumerate(self._unused):
            if record.request_digest == request_digest:
                return self._unused.pop(place)
        return None

    def recovered(self, record: CallRecord) -> None:
        """Counts a call that was answered from the record."""
        self.num_recovered += 1
        self.num_recovered_tokens += len(record.generation.token_ids)

    def drop(self) -> None:
        """Counts a call that was taken and cannot be answered from the record."""
        self._num_dropped += 1

    async def keep(self, call: int, record: CallRecord) -> None:
        """Keeps an answered call; see `CallRecords.keep`."""
        await self._keep(call, record)
        self.num_kept += 1


def request_digest(path: str, branch: str, served: Mapping[str, Any], *rest: object) -> bytes:
    """Returns a digest of all that decides the answer to a request.

    `served` is the request with the run's rules applied, `rest` is what else decides.
    """
    compared = {name: value for name, value in served.items() if name not in NOT_COMPARED}
    text = json.dumps([path, branch, compared, *map(repr, rest)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def prompt_digest(token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> bytes:
    """Returns a digest of a prompt's tokens and of its images with their places."""
    digest = hashlib.blake2b(
        np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=_DIGEST_BYTES
    )
    for image in images:
        digest.update(f"{image.offset}:{len(image.data)}:".encode())
        digest.update(image.data)
    return digest.digest()


def placed_generation(
    record: CallRecord, branch: ConversationBranch, parent: ConversationBranch | None
) -> Generation:
    """Returns the recorded reply with the experts that `branch` lacks.

    The branch may have had another number of tokens with experts when the reply was sampled: of two
    calls that continue one conversation, the one that comes first extends its branch. `parent` is
    the branch whose tokens a new branch repeats.
    """
    expert_ids = record.generation.expert_ids
    if expert_ids is None:
        return record.generation
    missing = record.experts_from - branch.num_routed
    if missing <= 0:
        return replace(record.generation, expert_ids=expert_ids[-missing:])
    assert parent is not None, "a call without a conversation before it has all experts"
    earlier = np.concatenate(parent.expert_ids)[branch.num_routed : record.experts_from]
    return replace(record.generation, expert_ids=np.concatenate([earlier, expert_ids]))
