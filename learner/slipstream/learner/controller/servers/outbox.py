"""What waits to be written on one stream: bounded, and no writer ever waits for its reader.

Waits for: messages. Unblocked by: `put`, `close`.
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
        self._messages: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, message: Message) -> bool:
        """False when it is closed, or full: its reader has not read for long."""
        if self._closed or len(self._messages) >= MAX_MESSAGES:
            return False
        self._messages.append(message)
        self._changed.set()
        return True

    def close(self) -> None:
        """The reader's loop ends behind what is in it."""
        self._closed = True
        self._changed.set()

    def pop(self) -> Message | None:
        """The oldest message; None when there is none."""
        return self._messages.popleft() if self._messages else None

    async def messages(self) -> AsyncIterator[Message]:
        """One after another, until `close`."""
        while True:
            while (message := self.pop()) is not None:
                yield message
            if self._closed:
                return
            await self._changed.wait()
            self._changed.clear()
