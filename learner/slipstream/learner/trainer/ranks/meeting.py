"""Where the ranks of a trainer meet: one torch store, on one address, for ranks of one start.

torch would open it on all addresses, take whoever connects for a rank, and wait without a limit for
what does not answer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from slipstream.protocol.access.exposure import RENDEZVOUS_VARIABLE
from slipstream.protocol.address import listen
from slipstream.protocol.errors import ConfigError
from torch.distributed.distributed_c10d import Store

# What torch may take beyond its own limit to say that nobody listens.
CONNECT_GRACE_S = 5.0
# Within which a rank 0 that answers has said that it is there.
RECOGNITION_LIMIT_S = 60.0


def meeting_place(rank: int, world_size: int, timeout: timedelta) -> Store:
    """What the ranks of this start share, once they all have come, on MASTER_ADDR alone.

    ConfigError when rank 0 cannot listen there, or where other machines do not reach it, or when
    what answers is no rank 0, or that of another run. TimeoutError names ranks that did not come.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as error:
        raise missing_variable(error) from None
    descriptor = None
    # torchrun's agent may have opened it already.
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
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
        descriptor = listener.detach()
    place = f"{host}:{port}"
    store = _connected(host, port, descriptor, timeout)
    return _all_here(store, (rank, world_size), place, timeout)


class Words:
    """What one rank says to all others outside of the order of collectives, from any thread."""

    def __init__(self, store: Store) -> None:
        """`store`: that in which all ranks have met."""
        self._store = store

    def say(self, word: str) -> None:
        """From now on every rank hears that it was said."""
        with contextlib.suppress(RuntimeError):
            # Whoever is left hears that rank 0 is gone, with all words.
            self._store.set(f"word/{word}", "said")

    def was_said(self, word: str) -> bool:
        """True as well when rank 0 is gone, which keeps the words."""
        try:
            return bool(self._store.check([f"word/{word}"]))
        except RuntimeError:
            return True

    def forget(self, word: str) -> None:
        """On one rank, when nobody listens for it any more."""
        self._store.delete_key(f"word/{word}")


def _connected(host: str, port: int, descriptor: int | None, timeout: timedelta) -> Store:
    """The store; ConfigError when what listens there is no store.

    torch waits without a limit for the first answer of whatever took the connection.
    """
    found: list[Store | BaseException] = []

    def connect() -> None:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                is_master=descriptor is not None,
                # torch would count whoever connects.
                wait_for_workers=False,
                timeout=timeout,
                master_listen_fd=descriptor,
            )
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            found.append(error)
        else:
            found.append(store)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + CONNECT_GRACE_S)
    if not found:
        raise ConfigError(
            f"learner.master: what listens on {host}:{port} did not answer like rank 0 "
            f"within {timeout.total_seconds():g} s; is the port used by another program?"
        )
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _all_here(store: Store, launch: tuple[int, int], place: str, timeout: timedelta) -> Store:
    """The part of the store that only ranks of this start know; `launch`: rank and world size."""
    rank, world_size = launch
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    known = f"{os.environ.get(RENDEZVOUS_VARIABLE, 'slipstream')}/{start}"
    ours: Store = dist.PrefixStore(known, store)  # type: ignore[attr-defined]
    ours.set(f"rank/{rank}", "here")
    has_own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Rank 0 opens its own store, and is the first in it.
    limit = min(timeout, timedelta(seconds=RECOGNITION_LIMIT_S)) if has_own_store else timeout
    if not _have_come(ours, [0], limit):
        raise ConfigError(
            f"learner.master: rank 0 at {place} does not know rank {rank} within "
            f"{limit.total_seconds():g} s: it is of another run, or has another token"
        )
    if not _have_come(ours, range(world_size), timeout):
        absent = [r for r in range(world_size) if not ours.check([f"rank/{r}"])]
        raise TimeoutError(
            f"of {world_size} ranks {', '.join(map(str, absent))} did not come to {place} "
            f"within {timeout.total_seconds():g} s"
        )
    return ours


def _have_come(store: Store, ranks: Iterable[int], limit: timedelta) -> bool:
    try:
        store.wait([f"rank/{rank}" for rank in ranks], limit)
    except dist.DistStoreError:
        return False
    return True


def missing_variable(error: KeyError) -> ConfigError:
    """For a variable of torchrun that is not set."""
    return ConfigError(f"the environment must set {error.args[0]}, as torchrun does")
