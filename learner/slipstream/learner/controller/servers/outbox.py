"""The messages that wait to be written on one stream: bounded; a writer never waits for the reader.

Waits for: messages, and the future that a message must come after. Unblocked by: `put`, `close`,
that future.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Message = TypeVar("Message")

MAX_MESSAGES = 10_000


@dataclass(frozen=True)
class _WaitingMessage(Generic[Message]):
    message: Message
    after: asyncio.Future[None] | None
    overtakes: bool

    @property
    def is_held(self) -> bool:
        return self.after is not None and not self.after.done()


class Outbox(Generic[Message]):
    """Messages of one stream, in their order; one reader."""

    def __init__(self, *, max_messages: int = MAX_MESSAGES) -> None:
        self._max_messages = max_messages
        self._messages: deque[_WaitingMessage[Message]] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(
        self,
        message: Message,
        *,
        after: asyncio.Future[None] | None = None,
        overtakes: bool = False,
    ) -> bool:
        """Adds a message; returns False when the outbox is closed or full.

        The message waits until `after` is done, and later messages wait with it. A message that
        `overtakes` does not wait for earlier ones.
        """
        if self._closed or len(self._messages) >= self._max_messages:
            return False
        self._messages.append(_WaitingMessage(message, after, overtakes))
        self._changed.set()
        if after is not None:
            after.add_done_callback(lambda _: self._changed.set())
        return True

    def close(self) -> None:
        """Ends the reader's loop behind the messages that are already in the outbox."""
        self._closed = True
        self._changed.set()

    def pop(self) -> Message | None:
        """Takes the next message that may be sent. None if there is none.

        Raises the error of the message's `after`, if that failed.
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
        """Yields messages until `close`; raises the error of a message's `after` if it failed."""
        while True:
            while (message := self.pop()) is not None:
                yield message
            if self._closed and not self._messages:
                return
            await self._changed.wait()
            self._changed.clear()
