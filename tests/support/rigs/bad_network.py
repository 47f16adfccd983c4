"""A TCP proxy between two parties of a test, which spoils what passes through it.

A connection has two directions: "up" from the caller to the service, "down" back to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Literal, Self

Direction = Literal["up", "down"]


class BadNetwork:
    """Passes connections on to `target`, "host:port" or "unix:path", until it is told otherwise.

    `held` has the directions in which bytes stop without a word, on old and new connections;
    `page`, if set, answers new connections in place of the service, which then hears nothing; with
    `trap`, nothing comes down any more once the caller has sent these bytes.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.held: set[Direction] = set()
        self.page: bytes | None = None
        self.trap: bytes | None = None
        self.connections = 0
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        await asyncio.gather(*self._passing)

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self, *directions: Direction) -> None:
        """Stops the bytes of these directions, and lets those of the others pass."""
        self.held = set(directions)
        self._changed.set()
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """Resets all connections, as a host does that has lost its power meanwhile."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            writer.transport.abort()

    def _begin(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        passing = asyncio.create_task(self._pass(reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            if self.page is not None:
                await reader.read(1)
                writer.write(self.page)
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
                return
            if self.target.startswith("unix:"):
                far = await asyncio.open_unix_connection(
                    self.target.removeprefix("unix:")
                )
            else:
                host, _, port = self.target.rpartition(":")
                far = await asyncio.open_connection(host, int(port))
            self._writers.add(far[1])
            try:
                ways = (
                    self._copy("up", reader, far[1]),
                    self._copy("down", far[0], writer),
                )
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
            finally:
                self._writers.discard(far[1])
                far[1].close()
        except OSError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _copy(
        self, way: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if way == "up" and self.trap is not None and self.trap in data:
                    self.hold("down")
                while way in self.held:
                    await self._changed.wait()
                writer.write(data)
                await writer.drain()
