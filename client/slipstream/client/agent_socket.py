"""The unix socket of one episode, by which a sandbox without network reaches its own model.

Consumes: connections. Produces: a protocol for each. Waits for: the next connection. Unblocked by:
a program that connects, or `close`.
"""

import asyncio
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from slipstream.core.machine.files import OwnedFolder

# Connections that wait until they are accepted; the next `connect` waits or is refused.
MAX_WAITING = 64
# Programs in a sandbox may have another user's number. The folder keeps other users out.
SOCKET_MODE = 0o666


class EpisodeSocket:
    """Listens at `path`, in a private folder of its own, as a task of the running event loop.

    A process that is killed leaves the folder to `remove_abandoned`.
    """

    def __init__(self, connection: Callable[[], asyncio.Protocol], opened: Collection[Any]) -> None:
        """`connection` makes uvicorn's protocol of each connection, in `opened` while that lasts.

        Raises OSError without a place for the socket.
        """
        self._folder = OwnedFolder("relay")
        self.path = str(self._folder.path / "model.sock")
        self._connection = connection
        self._opened = opened
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(self.path)
            Path(self.path).chmod(SOCKET_MODE)
            self._listening.listen(MAX_WAITING)
            self._listening.setblocking(False)
        except OSError:
            self._listening.close()
            self._folder.close()
            raise
        self._serving = asyncio.get_running_loop().create_task(self._serve())
        # A task that is cancelled before its first line closes nothing itself.
        self._serving.add_done_callback(lambda _: self._listening.close())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._connection, sock=self._listening)
        try:
            await server.serve_forever()
        finally:
            server.close()

    def close(self) -> None:
        """Removes socket and folder at once, and ends all connections."""
        self._serving.cancel()
        self._folder.close()
        for connection in list(self._opened):
            connection.transport.abort()
