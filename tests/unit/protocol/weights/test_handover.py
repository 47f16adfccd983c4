"""The hand-over of shared buffers between processes: no half-filled read, no hang."""

import hashlib
import json
import queue
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.handover import HandoverReceiver, HandoverSender
from slipstream.protocol.weights.shared_buffers import HostBuffers
from support.rigs import handover_ends
from support.rigs.waiting import LIMIT_S

NUM_BYTES = handover_ends.NUM_BYTES
# No test waits so long: whoever is told of an end does not wait for a deadline.
LONG_S = 30.0


class Process:
    """One end in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, handover_ends.__file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_S)


@pytest.fixture
def buffers() -> Iterator[HostBuffers]:
    buffers = HostBuffers.make(2, NUM_BYTES)
    yield buffers
    buffers.close()


@pytest.fixture
def sender() -> Iterator[HandoverSender]:
    sender = HandoverSender("members-1")
    yield sender
    sender.close()


def receivers(sender, buffers, count):
    processes = [Process("receive", sender.path, 1 + n) for n in range(count)]
    sender.accept(range(1, count + 1), buffers.handles, NUM_BYTES, LONG_S)
    assert [process.line() for process in processes] == ["joined"] * count
    return processes


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, NUM_BYTES, dtype=np.uint8)


def digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.tobytes()).hexdigest()


@pytest.mark.process
def test_every_receiver_reads_every_bucket_as_it_was_filled(sender, buffers):
    processes = receivers(sender, buffers, 2)
    for process in processes:
        for number in range(7):
            process.tell(f"read {number}")
    for number in range(7):
        if number >= 2:
            sender.wait_read(number - 2, LONG_S)
        buffers.arrays[number % 2][:] = content(number)
        sender.filled(number)
    sender.wait_read(6, LONG_S)
    for process in processes:
        assert [process.line() for _ in range(7)] == [
            digest(content(n)) for n in range(7)
        ]
        process.kill()


@pytest.mark.process
def test_a_buffer_is_not_filled_again_before_the_late_one_has_read_it(sender, buffers):
    quick, late = receivers(sender, buffers, 2)
    buffers.arrays[0][:] = content(0)
    sender.filled(0)
    quick.tell("read 0")
    late.tell("look 0")
    assert quick.line() == late.line() == digest(content(0))
    with pytest.raises(WeightSyncError, match=r"receiver 2 was not done within 0\.\d"):
        sender.wait_read(0, 0.2)
    late.tell("read 0")
    # The late receiver asks for a bucket that it was told of already.
    assert late.line() == digest(content(0))
    sender.wait_read(0, LONG_S)
    quick.kill()
    late.kill()


@pytest.mark.process
def test_a_dead_receiver_is_noticed_at_once(
    sender: HandoverSender, buffers: HostBuffers
) -> None:
    alive, dead = receivers(sender, buffers, 2)
    sender.filled(0)
    alive.tell("read 0")
    alive.line()
    dead.kill()
    with pytest.raises(WeightSyncError, match="receiver 2 is gone"):
        sender.wait_read(0, LONG_S)
    # The end of the communicator frees the others.
    alive.tell("read 1")
    sender.close()
    assert "the sender of members-1 is gone" in alive.line()
    alive.kill()


@pytest.mark.process
def test_a_dead_sender_is_noticed_at_once_and_leaves_nothing_behind() -> None:
    process = Process("send")
    path = Path(process.line())
    link = HandoverReceiver(str(path), "members-1", 1, LONG_S)
    opened = HostBuffers.open(link.handles, link.num_bytes)
    link.opened()
    link.wait(0, LONG_S)
    process.kill()
    with pytest.raises(WeightSyncError, match="the sender of members-1 is gone"):
        link.wait(1, LONG_S)
    assert int(opened.arrays[0].sum()) == NUM_BYTES
    assert not any(
        Path("/dev/shm", name).exists() for name in (path.name, *link.handles)
    )
    link.close()


def test_a_receiver_that_does_not_come_costs_one_deadline(
    sender: HandoverSender,
) -> None:
    with pytest.raises(
        WeightSyncError, match=r"receivers 1, 2 of members-1 .* within 0\.1 s"
    ):
        sender.accept([1, 2], (), 0, 0.1)


def test_receivers_that_are_lost_are_not_waited_for(sender: HandoverSender) -> None:
    abandoned = threading.Event()
    abandoned.set()
    with pytest.raises(
        WeightSyncError, match="did not join before one of them was lost"
    ):
        sender.accept([1, 2], (), 0, LONG_S, abandoned)


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(LONG_S)
    connection.connect(str(path))
    return connection


def hello(sender: HandoverSender, message: bytes) -> socket.socket:
    connection = connected(sender.path)
    connection.sendall(message)
    return connection


def test_only_the_user_of_the_sender_may_connect(sender: HandoverSender) -> None:
    assert stat.S_IMODE(sender.path.stat().st_mode) == 0o600
    sender.close()
    assert not sender.path.exists()


def test_others_are_left_out_and_so_is_who_ends_without_a_word(
    sender: HandoverSender,
) -> None:
    connected(sender.path).close()
    messages = (
        b'["members-0", 1]',
        b'["members-1", 3]',
        b'["members-1", []]',
        b"GET /",
        b"[1]",
    )
    hellos = [hello(sender, message) for message in (*messages, b"[" * 60_000, b"\xff")]
    member = hello(sender, b'["members-1", 1]')
    member.sendall(bytes(8))
    sender.accept([1], ("a", "b"), 7, LONG_S)
    assert json.loads(member.recv(4096)) == [["a", "b"], 7]
    for connection in hellos:
        assert connection.recv(1) == b""
        connection.close()
    member.close()


def test_a_number_out_of_turn_is_an_error(sender: HandoverSender) -> None:
    with hello(sender, b'["members-1", 1]') as member:
        member.sendall((3).to_bytes(8, "little"))
        with pytest.raises(WeightSyncError, match="receiver 1 said 3, not 0"):
            sender.accept([1], (), 0, LONG_S)


def test_a_sender_that_is_closed_waits_for_nobody(sender: HandoverSender) -> None:
    errors = queue.Queue[str]()

    def accept() -> None:
        with pytest.raises(WeightSyncError) as raised:
            sender.accept([1], (), 0, LONG_S)
        errors.put(str(raised.value))

    thread = threading.Thread(target=accept)
    thread.start()
    sender.close()
    assert "members-1 is closed" in errors.get(timeout=LONG_S / 2)
    thread.join(LIMIT_S)


@pytest.mark.parametrize(
    "message", [b"[1]", b"{}", b"[" * 60_000, b"\xff", b"[1, 2]", b""]
)
def test_an_answer_of_another_program_is_an_error_of_weights(
    message: bytes, tmp_path
) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(message)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(
            WeightSyncError, match="could not join communicator members-1"
        ):
            HandoverReceiver(path, "members-1", 1, LONG_S)
        thread.join(LIMIT_S)


def test_a_sender_that_is_not_on_this_host_is_said_with_the_rule(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        WeightSyncError, match="No such file .* ipc works within one host"
    ):
        HandoverReceiver(str(tmp_path / "socket"), "members-1", 1, 1.0)


@pytest.mark.process
def test_closing_wakes_a_thread_that_waits(
    sender: HandoverSender, buffers: HostBuffers
) -> None:
    (process,) = receivers(sender, buffers, 1)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(WeightSyncError, match="is gone"):
            sender.wait_read(0, LONG_S)
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    sender.close()
    assert failed.wait(LONG_S / 2)
    thread.join(LIMIT_S)
    process.kill()


@pytest.mark.parametrize(
    "name", ["slipstream-0000", "slipstream-../../etc/passwd", "other"]
)
def test_only_shared_buffers_are_opened(name: str) -> None:
    with pytest.raises(WeightSyncError, match=r"shared buffer"):
        HostBuffers.open([name], 16)
