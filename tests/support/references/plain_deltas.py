"""The payload of a bucket's changes, written and read one element after the other."""

import struct


def encode(old: bytes, new: bytes) -> bytes:
    """What travels instead of `new` to a party that holds `old`; see `protocol.weights.deltas`."""
    count = len(new) // 2
    changed = [
        n for n in range(count) if old[2 * n : 2 * n + 2] != new[2 * n : 2 * n + 2]
    ]
    per_block = [0] * -(-count // 256)
    for place in changed:
        per_block[place // 256] += 1
    payload = struct.pack(f"<{len(per_block)}H", *per_block)
    payload += b"".join(new[2 * place : 2 * place + 2] for place in changed)
    payload += bytes(place % 256 for place in changed)
    return payload + bytes(-len(payload) % 16)


def decode(old: bytes, payload: bytes) -> bytes:
    """The bucket that a payload makes of `old`."""
    new = bytearray(old)
    blocks = -(-len(old) // 512)
    counts = struct.unpack_from(f"<{blocks}H", payload)
    elements = 2 * blocks
    places = elements + 2 * sum(counts)
    for block, count in enumerate(counts):
        for _ in range(count):
            at = 2 * (256 * block + payload[places])
            new[at : at + 2] = payload[elements : elements + 2]
            elements = elements + 2
            places = places + 1
    return bytes(new)
