"""One end of a hand-over as a program: `python handover_ends.py receive|send PATH ...`.

It is told what to do by lines on its standard input, and answers each with one line.
"""

import hashlib
import sys

from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.handover import HandoverReceiver, HandoverSender
from slipstream.protocol.weights.shared_buffers import HostBuffers

NUM_BYTES = 1 << 16


def receive(path: str, rank: int) -> None:
    """`read N`: waits for bucket N, answers its digest and gives it back; `look N`: keeps it."""
    link = HandoverReceiver(path, "members-1", rank, 10.0)
    buffers = HostBuffers.open(link.handles, link.num_bytes)
    link.opened()
    print("joined", flush=True)
    for line in sys.stdin:
        word = line.split()[0]
        number = int(line.split()[1])
        try:
            link.wait(number, 10.0)
        except WeightSyncError as error:
            print(error, flush=True)
            continue
        digest = hashlib.blake2b(buffers.arrays[number % 2]).hexdigest()
        # Before the answer: after it the sender may be gone at any time.
        if word == "read":
            link.read(number)
        print(digest, flush=True)


def send() -> None:
    """Prints its path, fills bucket 0 with ones, says so, and waits."""
    sender = HandoverSender("members-1")
    buffers = HostBuffers.make(2, NUM_BYTES)
    print(sender.path, flush=True)
    sender.accept([1], buffers.handles, NUM_BYTES, 10.0)
    buffers.hide()
    buffers.arrays[0][:] = 1
    sender.filled(0)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        send()
