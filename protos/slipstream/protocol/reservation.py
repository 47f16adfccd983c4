"""What leases reserve in the trajectory queue, as pure functions.

A trajectory waits in the queue from its end until the journal settles it. Those of a batch wait for
one another, so a full queue would be one that nobody ever empties.

**Rule.** A lease is granted only if with it

    bytes that lie in the queue  +  episodes that may still be sent * largest trajectory  <=  size

Episodes that may still be sent are the members of leased groups that are not back, and those of
ended leases that their servers have not closed. An attempt that failed and is made again lies there
beside its promise until its own record acknowledges it, which waits for nothing else.

**Nothing gets stuck** if the queue holds one batch of largest trajectories: when fewer groups are
leased than a step trains there is room for one more, and as many groups, complete, make a batch.
"""

from __future__ import annotations

# Each of the two texts of a trajectory.
_TEXT_BYTES = 256
_TEXT_BYTES_PER_TOKEN = 5


def max_text_bytes(num_tokens: int) -> int:
    """Largest size in bytes of the prompt's and of the reply's text of `num_tokens` tokens."""
    return _TEXT_BYTES + _TEXT_BYTES_PER_TOKEN * num_tokens


def free_bytes(queue_bytes: int, waiting_bytes: int, promised: int, largest_bytes: int) -> int:
    """What is neither used nor reserved; below 0 while failed attempts are on their way out."""
    return queue_bytes - waiting_bytes - promised * largest_bytes


def may_promise(free: int, episodes: int, largest_bytes: int) -> bool:
    """Whether so many more episodes may be leased."""
    return episodes * largest_bytes <= free


def smallest_queue(groups_per_step: int, group_size: int, largest_bytes: int) -> int:
    """Bytes of the smallest queue with which a run cannot get stuck: one batch."""
    return groups_per_step * group_size * largest_bytes
