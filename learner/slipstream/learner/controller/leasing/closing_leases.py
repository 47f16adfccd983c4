"""Members that servers still run although their groups need them no more: pure state."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.types import GroupId
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.servers.server_states import ServerKey


@dataclass(eq=False)
class ClosingLease:
    """A lease of which `holder` still runs `members`: they keep their slots and bytes."""

    environment: str
    holder: ServerKey
    members: set[int] = field(default_factory=set)


class ClosingLeases:
    """Leases that are left over, by group.

    A lease leaves when `end_member` has named its last member, when the server has closed it
    (`close`), or with its server (`server_lost`).
    """

    def __init__(self) -> None:
        self.leases: dict[GroupId, ClosingLease] = {}

    def keep(self, group: Group, members: set[int]) -> None:
        """Keeps the slots of `members` until the group's holder has ended them."""
        if group.holder is not None:
            lease = ClosingLease(group.environment, group.holder)
            self.leases.setdefault(group.group_id, lease).members |= members

    def end_member(self, group_id: GroupId, member: int, epoch: int) -> None:
        """Notes that the server of `epoch` runs a member no more."""
        lease = self.leases.get(group_id)
        if lease is not None and lease.holder.epoch == epoch:
            lease.members.discard(member)
            if not lease.members:
                del self.leases[group_id]

    def close(self, group_id: GroupId, holder: ServerKey) -> None:
        """Notes that `holder` runs no member of a lease any more."""
        lease = self.leases.get(group_id)
        if lease is not None and lease.holder == holder:
            del self.leases[group_id]

    def server_lost(self, holder: ServerKey) -> None:
        """Drops the leases of a server that is gone."""
        self.leases = {g: lease for g, lease in self.leases.items() if lease.holder != holder}
