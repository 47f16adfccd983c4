"""Turns deliveries of the queue into trajectories of this run, and quarantines all others.

Consumes: deliveries. Produces: trajectories for the lease book; files, journal records and events
of quarantined deliveries. No delivery ends the controller. A server whose deliveries are all
quarantined is sent away; the run fails if there is no other server.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core.configuration.config_file import largest_trajectory_bytes, vocabulary_size
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.sampling_section import MAX_TURNS
from slipstream.core.types import GroupId, PolicyVersion, Trajectory, TrajectoryName
from slipstream.learner.controller.events import Severity
from slipstream.learner.controller.leasing.books import Books
from slipstream.learner.controller.records.earlier_ids import EarlierIds
from slipstream.learner.controller.records.ends import End
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.run import Run
from slipstream.learner.controller.servers.server_states import ServerKey
from slipstream.learner.controller.trajectories.endings import Endings
from slipstream.learner.controller.trajectories.quarantine import (
    MAX_IN_A_ROW,
    Quarantine,
    read_claim,
)
from slipstream.learner.controller.trajectories.trajectory_rules import KnownFacts, contradiction
from slipstream.protocol.codec import decode_trajectory
from slipstream.protocol.queue.base import Delivery

# Bytes for long names and a failure's message, in addition to what a lease reserves.
NAMES_BYTES = 64 << 10


class Inspector:
    """Decides which deliveries are new trajectories of this run and settles all others."""

    def __init__(
        self,
        run: Run,
        books: Books,
        endings: Endings,
        *,
        run_again: Callable[[TrajectoryName, str, bool], None],
    ) -> None:
        """`run_again` gets the name of each quarantined episode, the cause, and `will_retry`.

        `will_retry`: the server itself tries the episode again.
        """
        self._run, self._progress = run, run.progress
        self._book, self._fleet = books.leases, books.fleet
        self._journal, self._ledger = books.journal, books.ledger
        self._environments = books.environments.entries
        self._endings = endings
        self._again = run_again
        self._largest_bytes = largest_trajectory_bytes(run.config) + NAMES_BYTES
        self._vocabulary = vocabulary_size(run.config)
        self._earlier = EarlierIds(RunHistory(), books.journal)
        self.quarantine = Quarantine(run.config.run_dir / "quarantine")

    def restore(self, history: RunHistory) -> None:
        """Takes over journaled trajectories: they may be delivered again."""
        self._earlier = EarlierIds(history, self._journal)

    def decode(self, delivery: Delivery) -> Trajectory | ProtocolError:
        """Decodes a delivery, or returns the error with the reason; may run in a thread."""
        if len(delivery.data) > self._largest_bytes:
            return ProtocolError(
                f"it has {len(delivery.data)} bytes, no trajectory of this run has more than "
                f"{self._largest_bytes}"
            )
        try:
            return decode_trajectory(delivery.data)
        except ProtocolError as error:
            return error

    def take(
        self, delivery: Delivery, decoded: Trajectory | ProtocolError | None = None
    ) -> Trajectory | None:
        """Returns the trajectory of a delivery if it is valid and new; else settles the delivery.

        `decoded` is the result of `decode`; None: it was not called yet.
        """
        trajectory = self.decode(delivery) if decoded is None else decoded
        if isinstance(trajectory, ProtocolError):
            self.refuse(delivery, str(trajectory))
            return None
        if trajectory.run_id != self._progress.run_id:
            self._endings.acknowledge(delivery.trajectory_id)
            return None
        if self._earlier.holds(trajectory.group_id, delivery.trajectory_id):
            self._endings.acknowledge(delivery.trajectory_id)
            return None
        group = self._book.groups.get(trajectory.group_id)
        cause = contradiction(trajectory, group, self._facts())
        if not cause and group is not None:
            cause = self._wrong_adapter(trajectory)
        if trajectory.trajectory_id != delivery.trajectory_id:
            cause = f"it says that it is {trajectory.trajectory_id}"
        if cause:
            self.refuse(delivery, cause)
            return None
        key = ServerKey(trajectory.server_id, trajectory.server_epoch)
        tokens = trajectory.num_sampled_tokens
        if not self._ledger.receive(key, delivery.trajectory_id, tokens):
            return None
        if trajectory.has_reward:
            self.quarantine.good(key)
        return trajectory

    def _wrong_adapter(self, trajectory: Trajectory) -> str:
        """The reason why another adapter must learn from the trajectory; empty: none must.

        A trajectory of a withdrawn group is never trained, with any adapter.
        """
        entry = self._environments.get(trajectory.environment)
        if entry is None or entry.spec.adapter == trajectory.adapter:
            return ""
        return f"adapter {trajectory.adapter!r} sampled it, not {entry.spec.adapter!r}"

    def _send_away(self, server: ServerKey, cause: str) -> None:
        """Sends away a server that delivers nothing good; fails the run if there is no other."""
        fault = (
            f"rollout server {server.server_id} produces nothing but trajectories that cannot "
            f"be trained, the last {MAX_IN_A_ROW} in a row: {cause}"
        )
        session = self._fleet.find(server)
        others = [s for s in self._fleet.sessions.values() if s is not session and not s.is_leaving]
        if not others:
            self._progress.fail(fault)
        elif session is not None and not session.is_leaving:
            self._run.events.add(f"{fault}; it is sent away", Severity.ERROR)
            self._fleet.order_drain(session, fault, finish=False)

    def _facts(self) -> KnownFacts:
        progress, config = self._progress, self._run.config
        sampling = config.sampling
        reference = config.reference
        is_served = reference is not None and reference.server is not None
        return KnownFacts(
            servers=self._fleet.epochs,
            newest=PolicyVersion(progress.newest_incarnation, progress.version.step),
            vocabulary=self._vocabulary,
            # Not the bound for new leases, which may be lower by now.
            max_staleness=config.algorithm.max_staleness,
            max_episode_tokens=sampling.max_episode_tokens,
            max_total_tokens=sampling.total_tokens,
            max_branches=sampling.max_branches,
            max_turns=sampling.max_turns or MAX_TURNS,
            max_images=sampling.max_images,
            max_image_bytes=sampling.max_image_bytes,
            reference_top_k=reference.top_k if reference is not None and is_served else None,
        )

    def refuse(self, delivery: Delivery, cause: str, *, is_counted: bool = False) -> None:
        """Quarantines a delivery; with `is_counted` the ledger has its tokens already."""
        claim = read_claim(delivery, self._fleet.epochs, largest_bytes=self._largest_bytes)
        trajectory_id, server = delivery.trajectory_id, claim.server
        group_id = GroupId("") if claim.name is None else claim.name.group_id
        if self._earlier.holds(group_id, trajectory_id):
            self._endings.acknowledge(trajectory_id)
            return
        if not is_counted and not self._ledger.receive(server, trajectory_id, claim.tokens):
            return
        try:
            path = self.quarantine.add(delivery, claim, cause)
            place = f" ({path})" if path is not None else ""
        except OSError as error:
            place = f" (not kept, {error.filename}: {error.strerror})"
        self._ledger.end(End.QUARANTINED, claim.tokens)
        self._journal.append(
            "end",
            id=trajectory_id,
            end=End.QUARANTINED.value,
            cause=cause,
            tokens=claim.tokens,
            server=server.server_id,
            epoch=server.epoch,
        )
        self._endings.acknowledge(trajectory_id)
        self._run.events.add(
            f"quarantined {trajectory_id} of rollout server {server.server_id}: {cause}{place}",
            Severity.ERROR,
        )
        if self.quarantine.is_hopeless(server) and not self._progress.is_over:
            self._send_away(server, cause)
        if claim.name is not None:
            self._again(claim.name, cause, claim.will_retry)
        self._run.signal.notify()
