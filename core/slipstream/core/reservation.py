"""Reservations of leases in the trajectory queue, as pure functions.

A trajectory waits in the queue from its end until the journal has its outcome. Trajectories of a
batch wait for each other, so a full queue would never become empty.

**Rule.** A lease is granted only if with it

    bytes in the queue  +  episodes that may still be sent * largest trajectory  <=  size

Episodes that may still be sent are the undelivered members of leased groups, and those of ended
leases that their servers have not closed. The trajectory of a failed attempt waits in the queue
beside the reservation of its retry, until its own journal record acknowledges it; that record
waits for nothing else.

**No deadlock** occurs if the queue holds one batch of largest trajectories. While fewer groups are
leased than a step trains, there is room for one more, and a step's number of groups, once complete,
makes a batch.
"""

# Bytes of each of a trajectory's two texts besides those of its tokens.
_TEXT_BYTES = 256
_TEXT_BYTES_PER_TOKEN = 5


def max_text_bytes(num_tokens: int) -> int:
    """Returns the largest size of a prompt's or reply's text with `num_tokens` tokens, in bytes."""
    return _TEXT_BYTES + _TEXT_BYTES_PER_TOKEN * num_tokens


def free_bytes(queue_bytes: int, waiting_bytes: int, promised: int, largest_bytes: int) -> int:
    """Returns the queue's bytes neither used nor reserved; negative while failed attempts wait.

    `promised` episodes may still be sent, each of up to `largest_bytes`.
    """
    return queue_bytes - waiting_bytes - promised * largest_bytes


def may_promise(free: int, episodes: int, largest_bytes: int) -> bool:
    """Whether `episodes` more may be leased, each of `largest_bytes`, with `free` bytes left."""
    return episodes * largest_bytes <= free


def smallest_queue(groups_per_step: int, group_size: int, largest_bytes: int) -> int:
    """Returns the bytes of the smallest queue without a deadlock: one batch."""
    return groups_per_step * group_size * largest_bytes
