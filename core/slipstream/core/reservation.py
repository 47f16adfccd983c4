"""Reservations of leases in the trajectory queue, as pure functions.

A trajectory waits in the queue from its end until the journal has its outcome. Trajectories of a
batch wait for each other, so a queue that is full before a batch is complete would never empty.

**Rule.** A lease is granted only if, with this lease,

    bytes in the queue  +  episodes that may still be sent * largest trajectory  <=  size

Episodes that may still be sent are the undelivered members of leased groups, and the members of
ended leases until the server closes the lease. The trajectory of a failed attempt waits in the
queue in addition to the reservation of its retry, until its own journal record acknowledges it;
that record waits for nothing else.

**No deadlock** occurs if the queue has room for one batch of largest trajectories. While fewer
groups are leased than a step trains, there is room for one more group. As many complete groups as a
step trains make a batch.
"""

# Bytes that each of a trajectory's two texts may have in addition to the bytes of its tokens.
_TEXT_BYTES = 256
_TEXT_BYTES_PER_TOKEN = 5


def max_text_bytes(num_tokens: int) -> int:
    """Returns the largest size of a prompt's or reply's text with `num_tokens` tokens, in bytes."""
    return _TEXT_BYTES + _TEXT_BYTES_PER_TOKEN * num_tokens


def free_bytes(queue_bytes: int, waiting_bytes: int, promised: int, largest_bytes: int) -> int:
    """Returns the number of bytes of the queue that are neither used nor reserved.

    `waiting_bytes` are used, and `promised` episodes of up to `largest_bytes` may still be sent.
    The result may be negative while trajectories of failed attempts wait.
    """
    return queue_bytes - waiting_bytes - promised * largest_bytes


def may_promise(free: int, episodes: int, largest_bytes: int) -> bool:
    """Whether `episodes` more, of up to `largest_bytes` each, fit into the `free` bytes left."""
    return episodes * largest_bytes <= free


def smallest_queue(groups_per_step: int, group_size: int, largest_bytes: int) -> int:
    """Returns the size in bytes of the smallest queue without a deadlock, which holds one batch."""
    return groups_per_step * group_size * largest_bytes
