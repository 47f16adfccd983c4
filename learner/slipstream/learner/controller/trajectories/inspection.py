"""Turns deliveries of the queue into trajectories of this run, and quarantines all others.

Consumes: deliveries. Produces: trajectories for the lease book; journal records and events of
quarantined deliveries. No delivery ends the controller. If all deliveries of a server are
quarantined, the server is ordered to leave; the run fails if there is no other server.
"""

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
from google.protobuf.message import DecodeError
from slipstream.core.configuration.config_file import largest_trajectory_bytes, vocabulary_size
from slipstream.core.errors import ProtocolError, is_server_id
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.sections import MAX_TURNS, SamplingSection
from slipstream.core.staleness import max_text_bytes
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Trajectory,
    TrajectoryId,
    TrajectoryName,
)
from slipstream.learner.controller.leasing.groups import Group
from slipstream.learner.controller.leasing.scheduler import Books
from slipstream.learner.controller.records.history import RunHistory
from slipstream.learner.controller.records.journal import Journal
from slipstream.learner.controller.records.kinds import TrajectoryEnd
from slipstream.learner.controller.run import ControlledRun
from slipstream.learner.controller.servers.server_epochs import ServerEpochs
from slipstream.learner.controller.servers.session import ServerKey
from slipstream.protocol.codec import (
    MAX_TRAJECTORY_BYTES,
    decode_trajectory,
    trajectory_from_pb,
    unpack_tokens,
)
from slipstream.protocol.queue.base import Delivery
from slipstream.v1 import trajectory_pb2

# Quarantined deliveries of one server in a row after which that server is sent away.
MAX_IN_A_ROW = 16
# Largest number of servers whose deliveries in a row are counted; the oldest count goes first.
MAX_SERVERS = 1000
UNKNOWN = ServerId("unknown")
# Largest log-probability of a token after rounding.
LARGEST_LOGPROB = 1e-3
# Bytes for long names and a failure's message, in addition to what a lease reserves.
NAMES_BYTES = 64 << 10


def read_claim(
    delivery: Delivery, known: ServerEpochs, *, largest_bytes: int
) -> tuple[ServerKey, int, bool]:
    """Returns what an untrusted delivery states about itself, as far as readable; never raises.

    This is its server, its number of sampled tokens, and whether the server will retry the episode.
    The server is the server in `known` with the epoch in the delivery's id. If there is none, it is
    the server that the decoded trajectory names, or unknown. If a delivery has more than
    `largest_bytes`, or cannot be decoded, only its id is read.
    """
    name = TrajectoryName.parse(delivery.trajectory_id)
    epoch = 0 if name is None else name.epoch
    server = known.server_of(epoch) or ServerKey(UNKNOWN, epoch)
    message = trajectory_pb2.Trajectory()
    if len(delivery.data) <= largest_bytes:
        try:
            message.ParseFromString(delivery.data)
        except DecodeError:
            message.Clear()
    if server.server_id == UNKNOWN and is_server_id(message.server_id):
        server = ServerKey(ServerId(message.server_id), message.server_epoch)
    tokens = min(sum(message.run_lengths[1::2]), MAX_TRAJECTORY_BYTES // 4)
    return server, tokens, message.will_retry


def _branches_excess(trajectory: Trajectory, sampling: SamplingSection) -> str:
    """Returns the reason why no episode can have these branches, or "" if one can."""
    number = len(trajectory.branches)
    if number > sampling.max_branches:
        return f"it has {number} branches, sampling.max_branches is {sampling.max_branches}"
    max_tokens = sampling.max_episode_tokens
    for place, part in enumerate(trajectory.sequences, 1):
        branch_tokens = part.tokens.stop - part.tokens.start
        if branch_tokens > max_tokens:
            return (
                f"branch {place} has {branch_tokens} tokens, "
                f"sampling.max_episode_tokens is {max_tokens}"
            )
        if trajectory.has_reward and part.sampled.start == part.sampled.stop:
            return f"branch {place} has no sampled token"
    size = len(trajectory.token_ids)
    total_tokens = sampling.total_tokens
    if size > total_tokens:
        return f"its branches have {size} tokens, sampling.max_total_tokens is {total_tokens}"
    return ""


def _excess(trajectory: Trajectory, sampling: SamplingSection) -> str:
    """Returns the reason why no episode of this run can have this size, or "" if one can."""
    size = len(trajectory.token_ids)
    max_tokens = sampling.max_episode_tokens
    if trajectory.branches:
        if excess := _branches_excess(trajectory, sampling):
            return excess
    elif size > max_tokens:
        return f"it has {size} tokens, sampling.max_episode_tokens is {max_tokens}"
    if trajectory.teacher_prompt:
        read = len(trajectory.teacher_prompt) // 4 + size - sum(trajectory.run_lengths[:1])
        if read > max_tokens:
            return f"its reference reads {read} tokens, sampling.max_episode_tokens is {max_tokens}"
    turns = max(trajectory.num_turns, len(trajectory.run_lengths) // 2)
    max_turns = sampling.max_turns or MAX_TURNS
    if turns > max_turns:
        return f"it has {turns} turns, sampling.max_turns is {max_turns}"
    if trajectory.has_reward and trajectory.num_sampled_tokens == 0:
        return "it has a reward and no sampled token"
    number = len(trajectory.images)
    max_images = sampling.max_images
    if number > max_images:
        return f"it has {number} images, sampling.max_images is {max_images}"
    largest = max(map(len, trajectory.images), default=0)
    max_bytes = sampling.max_image_bytes
    if largest > max_bytes:
        return f"it has an image of {largest} bytes, sampling.max_image_bytes is {max_bytes}"
    for name, text in (("prompt", trajectory.prompt_text), ("reply", trajectory.reply_text)):
        allowed = max_text_bytes(size)
        if len(text) > allowed or len(text.encode()) > allowed:
            return f"its {name}'s text has more than the {allowed} bytes that {size} tokens allow"
    return ""


def _kept_fault(trajectory: Trajectory, vocabulary: int) -> str:
    """Returns why no token can have been drawn from its kept tokens, or "" for no fault."""
    if not trajectory.kept_tokens or not vocabulary:
        return ""
    kept_tokens = KeptTokens.unpacked(trajectory.kept_tokens, trajectory.num_sampled_tokens)
    largest = int(kept_tokens.ids.max(initial=0))
    if largest >= vocabulary:
        return f"kept token {largest} is outside the vocabulary of {vocabulary}"
    return ""


def _teacher_fault(trajectory: Trajectory, vocabulary: int, *, has_reference: bool) -> str:
    """Returns what is wrong with the prompt that the reference model reads, or "" for no fault."""
    if not trajectory.teacher_prompt:
        return ""
    if not has_reference:
        return "it has a teacher's prompt in a run without a reference model"
    largest = int(unpack_tokens(trajectory.teacher_prompt).max(initial=0))
    if vocabulary and largest >= vocabulary:
        return f"token {largest} of its teacher's prompt is outside the vocabulary of {vocabulary}"
    return ""


def _reference_fault(trajectory: Trajectory, top_k: int | None, vocabulary: int) -> str:
    """Returns what is wrong with the reference model's log-probabilities, or "" for no fault.

    `top_k` is the number of likely tokens that its server gives, or None without such a server.
    """
    reference = trajectory.reference
    if reference is None:
        is_trained = trajectory.purpose is Purpose.TRAINING and trajectory.has_reward
        lacks = is_trained and top_k is not None
        return "it lacks the log-probabilities of its teacher's server" if lacks else ""
    if reference.top_k != top_k:
        return (
            f"it has {reference.top_k} likely tokens of a reference, "
            f"reference.top_k is {'not set' if top_k is None else top_k}"
        )
    largest = int(reference.top_ids.max(initial=0))
    if vocabulary and largest >= vocabulary:
        return f"token {largest} of its reference is outside the vocabulary of {vocabulary}"
    return ""


def _misfit(trajectory: Trajectory, group: Group, max_staleness: int) -> str:
    """Returns the reason why no lease of the group allows the trajectory, or "" if one does."""
    task = (trajectory.environment, trajectory.task_index, trajectory.seed, trajectory.purpose)
    if task != (group.environment, group.task_index, group.seed, group.purpose):
        return f"it is about another task than {group.group_id} was leased for"
    if trajectory.member >= group.size:
        return f"{group.group_id} has {group.size} members, not a member {trajectory.member}"
    if excess := group.excess(trajectory.server_epoch, trajectory.attempt):
        return excess
    oldest = min((span.version.step for span in trajectory.version_spans), default=None)
    if oldest is None or group.purpose is not Purpose.TRAINING:
        return ""
    if group.deadline_step - oldest > max_staleness:
        return (
            f"version {oldest} sampled a token that step {group.deadline_step + 1} may train, "
            f"max_staleness is {max_staleness}"
        )
    return ""


class EarlierIds:
    """The trajectories that an earlier start of the controller has journaled."""

    def __init__(self, history: RunHistory, journal: Journal) -> None:
        self._ended = history.ended
        self._trained_in = history.trained_in
        # The batches of `history` change when a batch is set aside.
        self._batches = history.batches.copy()
        self._journal = journal
        # Step and ids of the batch read last: redelivered trajectories come in batch order.
        self._newest: tuple[int, frozenset[TrajectoryId]] = (-1, frozenset())

    def holds(self, group_id: GroupId, trajectory_id: TrajectoryId) -> bool:
        """Whether the trajectory has ended or is in a batch; reads the file of that batch."""
        if trajectory_id in self._ended:
            return True
        step = self._trained_in.get(group_id)
        if step is None:
            return False
        batch = self._batches.get(step)
        if batch is None:
            return True
        if self._newest[0] != step:
            try:
                stored = self._journal.read_batch(batch)
                read = map(trajectory_from_pb, stored.trajectories)
                ids = frozenset(trajectory.trajectory_id for trajectory in read)
            except ProtocolError:
                if self._journal.path(step, batch.attempt).is_file():
                    raise
                # The file was removed, maybe just now, because a checkpoint covers the batch.
                return True
            self._newest = step, ids
        return trajectory_id in self._newest[1]


class Inspector:
    """Decides which deliveries are new trajectories of this run; quarantines invalid deliveries."""

    def __init__(
        self,
        run: ControlledRun,
        books: Books,
        *,
        run_again: Callable[[TrajectoryName, str, bool], None],
    ) -> None:
        """Takes `run_again`, which is called for each quarantined episode.

        Its arguments are the name of the trajectory, the cause, and whether the server will retry
        the episode without an order.
        """
        self._run = run
        self._progress = run.progress
        self._book = books.leases
        self._fleet = books.fleet
        self._ledger = books.ledger
        self._environments = books.environments.entries
        self._again = run_again
        self._largest_bytes = largest_trajectory_bytes(run.config) + NAMES_BYTES
        # Number of token ids. 0 if it is unknown.
        self._vocabulary = vocabulary_size(run.config.model.path)
        # Trajectories that earlier starts have journaled may be delivered again.
        self.earlier = EarlierIds(RunHistory(), books.journal)
        # The deliveries that were quarantined: all, and those in a row of each server.
        self.num_quarantined = 0
        self._in_a_row: Counter[ServerKey] = Counter()

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
        """Returns the trajectory of a delivery if it is valid and new, else None.

        An invalid delivery is quarantined, and a delivery whose trajectory is already in the
        journal is acknowledged. `decoded` is the result of `decode`, or None if it was not called
        yet.
        """
        trajectory = self.decode(delivery) if decoded is None else decoded
        if isinstance(trajectory, ProtocolError):
            self.refuse(delivery, str(trajectory))
            return None
        if trajectory.run_id != self._progress.run_id:
            self.refuse(delivery, f"it is of run {trajectory.run_id}")
            return None
        if self.earlier.holds(trajectory.group_id, delivery.trajectory_id):
            self._ledger.acknowledge(delivery.trajectory_id)
            return None
        group = self._book.groups.get(trajectory.group_id)
        cause = self.contradiction(trajectory, group)
        entry = self._environments.get(trajectory.environment)
        # Trajectories of withdrawn groups are never trained.
        is_held = not cause and group is not None
        if is_held and entry is not None and entry.spec.adapter != trajectory.adapter:
            cause = f"adapter {trajectory.adapter!r} sampled it, not {entry.spec.adapter!r}"
        if trajectory.trajectory_id != delivery.trajectory_id:
            cause = f"it says that it is {trajectory.trajectory_id}"
        if cause:
            self.refuse(delivery, cause)
            return None
        key = ServerKey(trajectory.server_id, trajectory.server_epoch)
        tokens = trajectory.num_sampled_tokens
        if not self._ledger.receive(key, delivery.trajectory_id, tokens, delivery.sent):
            return None
        if trajectory.has_reward:
            self._in_a_row.pop(key, None)
        return trajectory

    def contradiction(self, trajectory: Trajectory, group: Group | None) -> str:
        """Returns why a trajectory, of `group` if the book has it, is invalid, or "" if valid."""
        config = self._run.config
        vocabulary = self._vocabulary
        progress = self._progress
        key = ServerKey(trajectory.server_id, trajectory.server_epoch)
        if key not in self._fleet.epochs:
            return f"no rollout server {key.server_id} ever had the epoch {key.epoch:x}"
        newest = PolicyVersion(progress.newest_incarnation, progress.version.step)
        for span in trajectory.version_spans:
            if span.version.step > newest.step or span.version.incarnation > newest.incarnation:
                return f"version {span.version} sampled it, the newest is {newest}"
        if vocabulary and trajectory.token_ids.size:
            largest = int(np.maximum.reduce(trajectory.token_ids))
            if largest >= vocabulary:
                return f"token {largest} is outside the vocabulary of {vocabulary}"
        has_reference = config.needs_reference
        if fault := _teacher_fault(trajectory, vocabulary, has_reference=has_reference):
            return fault
        if fault := _kept_fault(trajectory, vocabulary):
            return fault
        logprobs = trajectory.behavior_logprobs
        # The functions around the ufuncs would double the time for an episode.
        if logprobs.size and not (highest := float(np.maximum.reduce(logprobs))) <= LARGEST_LOGPROB:
            return f"a log-probability is {highest}, above 0"
        if fault := _excess(trajectory, config.sampling):
            return fault
        reference = config.reference
        is_scored = reference is not None and reference.server_of(trajectory.environment)
        top_k = reference.top_k if reference is not None and is_scored else None
        fault = _reference_fault(trajectory, top_k, vocabulary)
        if fault or group is None:
            return fault
        # Not the bound for new leases, which may be lower by now.
        return _misfit(trajectory, group, config.algorithm.max_staleness)

    def refuse(self, delivery: Delivery, cause: str, *, is_counted: bool = False) -> None:
        """Quarantines a delivery; `is_counted` says whether the ledger already has its tokens.

        A server whose deliveries are all quarantined is sent away; the run fails if it is the last.
        """
        server, tokens, will_retry = read_claim(
            delivery, self._fleet.epochs, largest_bytes=self._largest_bytes
        )
        trajectory_id = delivery.trajectory_id
        name = TrajectoryName.parse(delivery.trajectory_id)
        group_id = GroupId("") if name is None else name.group_id
        if self.earlier.holds(group_id, trajectory_id):
            self._ledger.acknowledge(trajectory_id)
            return
        if not is_counted and not self._ledger.receive(
            server, trajectory_id, tokens, delivery.sent
        ):
            return
        self.num_quarantined += 1
        self._in_a_row[server] += 1
        if len(self._in_a_row) > MAX_SERVERS:
            del self._in_a_row[next(iter(self._in_a_row))]
        end = TrajectoryEnd.QUARANTINED
        self._ledger.record(trajectory_id, end, cause, tokens=tokens, server=server)
        message = f"quarantined {trajectory_id} of rollout server {server.server_id}: {cause}"
        self._run.events.add(message, logging.ERROR)
        if self._in_a_row[server] >= MAX_IN_A_ROW and not self._progress.is_over:
            fault = (
                f"rollout server {server.server_id} produces nothing but trajectories that cannot "
                f"be trained, the last {MAX_IN_A_ROW} in a row: {cause}"
            )
            session = self._fleet.find(server)
            every = self._fleet.sessions.values()
            if all(other is session or other.is_leaving for other in every):
                self._progress.fail(fault)
            elif session is not None and not session.is_leaving:
                self._run.events.add(f"{fault}; it is sent away", logging.ERROR)
                self._fleet.order_drain(session, fault, finish=False)
        if name is not None:
            self._again(name, cause, will_retry)
        self._run.signal.notify()
