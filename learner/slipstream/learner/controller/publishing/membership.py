"""The servers that share a communicator with the trainer, from publish to publish."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.servers.session import ServerSession
from slipstream.v1 import weights_pb2


class Membership:
    """The members of the newest communicator; a change of members or a fault needs a new one."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # Number of the trainer's ranks that send; they are the first ranks of a communicator.
        self.num_senders = 1
        self._members: tuple[ServerKey, ...] = ()
        self._epoch, self._name = 0, ""

    def forget(self, communicator_id: str | None = None) -> None:
        """Drops the communicator; with an id, only if it is the newest communicator."""
        if communicator_id in (None, self._name):
            self._members = ()

    def server_lost(self, key: ServerKey) -> None:
        """Drops the communicator if this server was a member."""
        if key in self._members:
            self.forget()

    def order_for(
        self, targets: Sequence[ServerSession], transport: str, *, trainer_has: str
    ) -> weights_pb2.PublishOrder:
        """Returns an order for `targets` with their ranks, with a new communicator if needed.

        The newest communicator is used again if its members are the same and the trainer still
        has it (`trainer_has`).
        """
        members = tuple(session.key for session in targets)
        new = members != self._members or trainer_has != self._name
        if new:
            self._members = members
            self._epoch += 1
            # A secret that is sent only over gRPC: strangers cannot join by gloo or ipc.
            self._name = f"{self._run_id}-{self._epoch}-{secrets.token_hex(16)}"
        receivers, rank = [], self.num_senders
        for session in targets:
            workers = session.hello.engine_workers
            receivers.append(
                weights_pb2.Receiver(server_id=session.name, first_rank=rank, num_workers=workers)
            )
            rank += workers
        return weights_pb2.PublishOrder(
            communicator=weights_pb2.Communicator(
                communicator_id=self._name,
                transport=transport,
                world_size=rank,
                num_senders=self.num_senders,
            ),
            new_communicator=new,
            receivers=receivers,
        )
