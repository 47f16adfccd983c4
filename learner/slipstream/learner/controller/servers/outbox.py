"""What waits to be written on one stream: bounded, and no writer ever waits for its reader.

Waits for: messages, and what a message must come after. Unblocked by: `put`, `close`, the end of
that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Message = TypeVar("Message")

MAX_MESSAGES = 10_000


@dataclass(frozen=True)
class _Waiting(Generic[Message]):
    message: Message
    after: asyncio.Future[None] | None
    overtakes: bool

    @property
    def is_held(self) -> bool:
        return self.after is not None and not self.after.done()


class Outbox(Generic[Message]):
    """Messages of one stream, in their order; one reader."""

    def __init__(self) -> None:
        self._messages: deque[_Waiting[Message]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(
        self,
        message: Message,
        *,
        after: asyncio.Future[None] | None = None,
        overtakes: bool = False,
    ) -> bool:
        """False when it is closed, or full: its reader has not read for long.

        The message waits until `after` is done, and those behind it with it, but for those that
        overtake what is held so.
        """
        if self._closed or len(self._messages) >= MAX_MESSAGES:
            return False
        self._messages.append(_Waiting(message, after, overtakes))
        self._changed.set()
        if after is not None:
            after.add_done_callback(lambda _: self._changed.set())
        return True

    def close(self) -> None:
        """The reader's loop ends behind what is in it."""
        self._closed = True
        self._changed.set()

    def pop(self) -> Message | None:
        """The next message that may leave; None when there is none.

        Raises what it comes after, if that failed.
        """
        is_held = False
        for place, waiting in enumerate(self._messages):
            is_held = is_held or waiting.is_held
            if not is_held or (waiting.overtakes and not waiting.is_held):
                del self._messages[place]
                if waiting.after is not None:
                    waiting.after.result()
                return waiting.message
        return None

    async def messages(self) -> AsyncIterator[Message]:
        """One after another, until `close`; raises what a message comes after, if that failed."""
        while True:
            while (message := self.pop()) is not None:
                yield message
            if self._closed and not self._messages:
                return
            await self._changed.wait()
            self._changed.clear()
