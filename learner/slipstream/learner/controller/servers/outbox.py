"""What waits to be written on one stream: bounded, and no writer ever waits for its reader.

Waits for: messages, and what a message must come after. Unblocked by: `put`, `close`, the end of
that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Message = TypeVar("Message")

MAX_MESSAGES = 10_000


class Outbox(Generic[Message]):
    """Messages of one stream, in their order; one reader."""

    def __init__(self) -> None:
        self._messages: deque[tuple[Message, asyncio.Future[None] | None]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, message: Message, after: asyncio.Future[None] | None = None) -> bool:
        """False when it is closed, or full: its reader has not read for long.

        The message, and those behind it, are written when `after` is done.
        """
        if self._closed or len(self._messages) >= MAX_MESSAGES:
            return False
        self._messages.append((message, after))
        self._changed.set()
        return True

    def close(self) -> None:
        """The reader's loop ends behind what is in it."""
        self._closed = True
        self._changed.set()

    def pop(self) -> Message | None:
        """The oldest message, whatever it must come after; None when there is none."""
        return self._messages.popleft()[0] if self._messages else None

    async def messages(self) -> AsyncIterator[Message]:
        """One after another, until `close`; raises what a message comes after, if that failed."""
        while True:
            while self._messages:
                message, after = self._messages.popleft()
                if after is not None:
                    # It is others' too.
                    await asyncio.shield(after)
                yield message
            if self._closed:
                return
            await self._changed.wait()
            self._changed.clear()
