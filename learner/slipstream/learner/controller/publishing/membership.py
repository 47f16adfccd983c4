"""Which servers share a communicator with the trainer, from publish to publish."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from slipstream.learner.controller.servers.fleet import ServerSession
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.v1 import weights_pb2


class Membership:
    """The members of the newest communicator; a new one is needed when they change or it broke."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        # Ranks of the trainer that send: the first ranks of a communicator.
        self.num_senders = 1
        self._members: tuple[ServerKey, ...] = ()
        self._epoch, self._name = 0, ""

    def forget(self, communicator_id: str | None = None) -> None:
        """The communicator broke; with an id, only if that is the newest one."""
        if communicator_id in (None, self._name):
            self._members = ()

    def server_lost(self, key: ServerKey) -> None:
        """It broke if this server was a member."""
        if key in self._members:
            self.forget()

    def order_for(
        self, targets: Sequence[ServerSession], transport: str, *, trainer_has: str
    ) -> weights_pb2.PublishOrder:
        """Who takes part, through the communicator that `trainer_has` if that is still the one."""
        members = tuple(session.key for session in targets)
        new = members != self._members or trainer_has != self._name
        if new:
            self._members = members
            self._epoch += 1
            # Travels over gRPC alone: who does not know it cannot join by gloo or ipc.
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
