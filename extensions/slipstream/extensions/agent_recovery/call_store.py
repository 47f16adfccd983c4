"""The kept calls of open episodes, in the run's folder: a file for each episode.

A file has the encoded messages one after the other, each behind its length and its CRC-32. What
follows the first damaged one is not read: a call that is not kept is only sampled again. So no
write waits for the disk; a kill -9 loses nothing that the kernel has.
"""

import shutil
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from slipstream.core.errors import ProtocolError
from slipstream.core.machine.files import open_regular
from slipstream.protocol.bounds import decode, max_message_bytes
from slipstream.v1 import calls_pb2 as pb

# Most bytes of the calls of one episode.
MAX_EPISODE_BYTES = 256 << 20
_FRAME = struct.Struct("<II")
_END = ".calls"


class EpisodeFull(Exception):
    """Raised for a call that finds no room in its episode's file."""


class CallStore:
    """The files of a run's open episodes; its methods block for the file system alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, request: pb.KeepCallRequest) -> None:
        """Appends a call to its episode's file. Raises EpisodeFull beyond `MAX_EPISODE_BYTES`."""
        data = request.SerializeToString()
        self._folder.mkdir(exist_ok=True)
        path = self._path(request.episode)
        with path.open("ab") as file:
            if file.tell() + len(data) > MAX_EPISODE_BYTES:
                raise EpisodeFull
            header = _FRAME.pack(len(data), zlib.crc32(data))
            file.write(header + data)

    def calls(self, episode: pb.EpisodeName) -> list[pb.KeepCallRequest]:
        """Returns the calls of all attempts at an episode, each once, in the order of `keep`."""
        calls: dict[tuple[int, int, int], pb.KeepCallRequest] = {}
        for request in _read(self._path(episode)):
            attempt = request.episode
            key = (attempt.server_epoch, attempt.attempt, request.call)
            calls.setdefault(key, request)
        return list(calls.values())

    def forget(self, episode: pb.EpisodeName) -> None:
        """Removes an episode's calls, if there are any."""
        self._path(episode).unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Returns the files that there are."""
        return list(self._folder.glob(f"*{_END}"))

    def forget_others(self, paths: Iterable[Path], episodes: Collection[tuple[str, int]]) -> None:
        """Removes those of `paths` that are of none of the episodes, named by group and member.

        The paths must be older than `episodes`: a file that came later is of an open episode.
        """
        open_names = {_name(group_id, member) for group_id, member in episodes}
        for path in paths:
            if path.name not in open_names:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes all calls."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, episode: pb.EpisodeName) -> Path:
        return self._folder / _name(episode.group_id, episode.member)


def _name(group_id: str, member: int) -> str:
    # The ids of groups that the book holds have no slash.
    return f"{group_id}.{member}{_END}"


def _read(path: Path) -> Iterator[pb.KeepCallRequest]:
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, crc32 = _FRAME.unpack(frame)
            if length > max_message_bytes(pb.KeepCallRequest):
                return
            data = file.read(length)
            is_whole = len(data) == length
            if not is_whole or zlib.crc32(data) != crc32:
                return
            try:
                yield decode(pb.KeepCallRequest, data)
            except ProtocolError:
                return
