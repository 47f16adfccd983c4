"""The rendezvous of a trainer's ranks: a torch store on one address, for the ranks of one launch.

torch's own rendezvous opens the store on all addresses, counts every client as a rank, and waits
forever for a server that does not answer.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import listen
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE
from slipstream.protocol.weights.publish_waits import Unanswered, on_thread
from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")
# Seconds after a time limit in which rank 0 may still answer: torch pauses between its attempts.
CONNECT_GRACE_S = 5.0
# Seconds within which a connection shows that something listens at the address.
PROBE_LIMIT_S = 5.0
# Seconds within which a rank 0 that answers must have announced itself in the store.
RECOGNITION_LIMIT_S = 60.0


def rendezvous(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Waits for all ranks of this launch to join, and returns the store that they share.

    Rank 0 listens only on MASTER_ADDR. Raises ConfigError if MASTER_ADDR or MASTER_PORT is not set,
    if rank 0 cannot listen there, if other machines cannot reach the address, or if the server
    there is not rank 0 of this run. Raises TimeoutError if rank 0 does not answer, or with the
    ranks that did not join within `timeout`.
    """
    try:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise missing_variable(error) from None
    # torchrun's agent may have opened the store already.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    descriptor = _listen(host, port, world_size) if rank == 0 and not has_agent else None

    def connect() -> Store:
        try:
            return open_store(host, port, timeout, descriptor)
        except dist.DistNetworkError as error:
            raise Unanswered from error

    def answered(work: Callable[[], Result], limit: timedelta) -> Result:
        # torch would wait forever for a stopped rank 0.
        return on_thread(work, limit.total_seconds() + CONNECT_GRACE_S, name="rendezvous")

    def have_come(ranks: Iterable[int], limit: timedelta) -> bool:
        keys = [f"rank/{rank}" for rank in ranks]
        try:
            answered(lambda: ours.wait(keys, limit), limit)
        except dist.DistStoreError:
            return False
        return True

    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"{os.environ.get(RENDEZVOUS_VARIABLE, 'slipstream')}/{start}"
    # A rank 0 with its own store announces itself before all others, so this limit is short.
    first = timeout if has_agent else min(timeout, timedelta(seconds=RECOGNITION_LIMIT_S))
    within = f"within {timeout.total_seconds():g} s"
    try:
        ours: Store = dist.PrefixStore(prefix, answered(connect, timeout))  # type: ignore[attr-defined]
        ours.set(f"rank/{rank}", "here")
        if not have_come([0], first):
            raise ConfigError(
                f"learner.master: rank 0 at {host}:{port} did not recognise rank {rank} within "
                f"{first.total_seconds():g} s: it belongs to another run, or has another token"
            )
        if not have_come(range(world_size), timeout):
            absent = answered(
                lambda: [str(r) for r in range(world_size) if not ours.check([f"rank/{r}"])],
                timedelta(),
            )
            raise TimeoutError(
                f"of {world_size} ranks {', '.join(absent)} did not join at {host}:{port} {within}"
            )
        return ours
    except Unanswered as unanswered:
        raise _silence_of_rank_0(host, port, within) from unanswered


def _listen(host: str, port: int, world_size: int) -> int:
    """Returns the descriptor of rank 0's listening socket; raises ConfigError as `rendezvous`."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"learner.master must be an address of node 0 and a free port there, "
            f"got {host}:{port}: {error}"
        ) from error
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    address = str(listener.getsockname()[0])
    if not is_alone and ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"learner.master must be an address that all nodes reach, got {host}, "
            f"which is {address} on node 0"
        )
    return listener.detach()


def _silence_of_rank_0(host: str, port: int, within: str) -> TimeoutError:
    """Returns the error for a rank 0 that gave no answer, by whether anything listens there.

    No ConfigError: rank 0 may answer at the next start. If another program has the port, rank 0
    itself ends with ConfigError.
    """
    try:
        socket.create_connection((host, port), timeout=PROBE_LIMIT_S).close()
    except OSError as error:
        return TimeoutError(
            f"rank 0 did not listen on {host}:{port} (learner.master) {within}: it has not "
            f"started, is stopped or very slow ({error.strerror or error})"
        )
    return TimeoutError(
        f"learner.master: what listens on {host}:{port} did not answer like rank 0 {within}: "
        "rank 0 is stopped or very slow, or another program has the port"
    )


def open_store(host: str, port: int, timeout: timedelta, descriptor: int | None = None) -> Store:
    """Connects to the store at an address, or opens it on the `descriptor` of a listening socket.

    Without a descriptor torch itself would listen, on all addresses.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=descriptor is not None,
        # With a count of workers torch would count every client that connects.
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=descriptor,
    )


class RankFlags:
    """Flags that any rank sets for all others, from any thread; one rank takes a flag's data."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, flag: str, data: bytes = b"") -> None:
        """Sets a flag; from now on every rank sees it."""
        with contextlib.suppress(RuntimeError):
            # Without rank 0, which holds the flags, `is_set` is true on the remaining ranks.
            self._store.set(f"flag/{flag}", data)  # type: ignore[arg-type]  # it takes bytes too

    def is_set(self, flag: str) -> bool:
        """Whether the flag is set; also true if rank 0, which stores the flags, has ended."""
        try:
            return bool(self._store.check([f"flag/{flag}"]))
        except RuntimeError:
            return True

    def take(self, flag: str) -> bytes | None:
        """Removes a flag and returns its data; returns None if the flag is not set."""
        if not self.is_set(flag):
            return None
        data: bytes = self._store.get(f"flag/{flag}")
        self._store.delete_key(f"flag/{flag}")
        return data


def missing_variable(error: KeyError) -> ConfigError:
    """Returns the error for a missing environment variable of torchrun, from its KeyError."""
    return ConfigError(f"the environment must set {error.args[0]}, as torchrun does")
