"""One publish on all ranks: rank 0 calls the controller, every sending rank sends its buckets.

All ranks learn of a problem on any rank before they continue: then all abort, and rank 0 reports
the problem once. A rank that cannot send still takes part in filling buckets, as others wait for
it.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.settings.config import Config, WeightsSection
from slipstream.core.types import TokenArray
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.schedule import sequence_logprobs
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.weights.bucket_sender import BucketSender
from slipstream.learner.trainer.weights.gloo_sender import GlooSender
from slipstream.learner.trainer.weights.ipc_sender import IpcSender
from slipstream.learner.trainer.weights.nccl_sender import open_nccl_sender
from slipstream.learner.trainer.weights.published import Published
from slipstream.learner.trainer.weights.weight_stream import Release, WeightDigests
from slipstream.protocol.codec import pack_logprobs, pack_tokens
from slipstream.protocol.weights.buckets import Bucket
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import trainer_pb2, weights_pb2
from torch import Tensor

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds between two checks that all members are still there.
_ASK_PERIOD_S = 0.5


class BucketSenders:
    """The senders of one rank, one for each transport, created at first use."""

    def __init__(
        self, weights: WeightsSection, device: torch.device, *, largest_bucket: int, host: str
    ) -> None:
        """Takes the size of the largest bucket, in bytes, and the host of rank 0."""
        self._weights, self._device = weights, device
        self._largest_bucket, self._host = largest_bucket, host
        self._made: dict[str, BucketSender] = {}

    def for_transport(self, transport: str) -> BucketSender:
        """Returns the sender of a transport.

        Raises ConfigError if the transport is unknown, or is nccl without a GPU.
        """
        if transport not in self._made:
            self._made[transport] = self._make(transport)
        return self._made[transport]

    def abort(self) -> None:
        """Aborts every communicator."""
        for sender in self._made.values():
            sender.abort()

    def _make(self, transport: str) -> BucketSender:
        if transport == "gloo":
            return GlooSender(self._weights, host=self._host)
        if transport == "ipc":
            return IpcSender(
                self._weights, self._device, num_bytes=self._largest_bucket, host=self._host
            )
        if transport != "nccl":
            raise ConfigError(
                f"the transport of weights must be gloo, nccl or ipc, got {transport!r}"
            )
        if self._device.type != "cuda":
            raise ConfigError("weights.transport is nccl, but the trainer has no GPU")
        return open_nccl_sender(self._weights, self._device)


class WeightPublisher:
    """Carries out publish orders; `run` and `abort` are collective."""

    def __init__(
        self,
        published: Published,
        senders: BucketSenders,
        *,
        ranks: Ranks,
        client: ControllerClient,
    ) -> None:
        self._published, self._senders = published, senders
        self._ranks, self._client = ranks, client
        self._sender: BucketSender | None = None

    @property
    def communicator_id(self) -> str:
        """The id of the communicator through which this rank can send, or "" if there is none."""
        return "" if self._sender is None else self._sender.communicator_id or ""

    def run(self, order: weights_pb2.PublishOrder, probe: weights_pb2.Probe | None) -> None:
        """Carries out `order`, and reports a failed transfer to the controller instead of raising.

        The report includes rank 0's `probe`; other ranks' probes are ignored.
        """
        result = trainer_pb2.PublishResult(publish_id=order.publish_id)
        # Parameters move to the device before any member waits for a bucket and its deadline runs.
        with self._published.weights.resident():
            if order.new_communicator:
                # The previous communicator may use another transport.
                self._senders.abort()
            self._sender = sender = self._senders.for_transport(order.communicator.transport)
            sender.bucket_deadline_s = order.bucket_deadline_s
            announced, problem = self._agree(order, sender)
            if announced is not None:
                problem = self._send(order, announced, result, sender)
            elif not problem:
                # The controller has abandoned the publish.
                return
            if not problem and probe is not None:
                result.probe.CopyFrom(probe)
            self._report(order, result, problem)

    def abort(self) -> None:
        """Aborts every communicator."""
        self._senders.abort()

    def _send(
        self,
        order: weights_pb2.PublishOrder,
        announced: weights_pb2.Communicator,
        result: trainer_pb2.PublishResult,
        sender: BucketSender,
    ) -> str:
        """Sends all buckets, and fills `result`; returns the first problem of any rank, or ""."""
        published, started_s = self._published, time.monotonic()
        digests = None
        problem = self._connect(order, announced, sender) if order.new_communicator else ""
        if not problem:
            problem, digests = self._deliver(order, result, sender)
        result.send_s = time.monotonic() - started_s
        if problem or digests is None:
            return problem
        result.bucket_digests.extend(digests.buckets)
        result.export_s = digests.export_s
        result.bytes_sent = published.num_bytes(adapters_alone=order.adapters_alone)
        return ""

    def _agree(
        self, order: weights_pb2.PublishOrder, sender: BucketSender
    ) -> tuple[weights_pb2.Communicator | None, str]:
        """Returns, on every rank, the communicator to send through and "", or None and a problem.

        None and "" mean that the controller has abandoned the publish.
        """
        if order.begun:
            return order.communicator, ""
        data = None
        if self._ranks.is_main:
            communicator, problem = self._announce(order, sender)
            found = communicator.SerializeToString().hex() if communicator is not None else None
            data = json.dumps([found, problem]).encode()
        found, problem = json.loads(self._ranks.broadcast_bytes(data))
        if found is None:
            return None, problem
        return weights_pb2.Communicator.FromString(bytes.fromhex(found)), ""

    def _announce(
        self, order: weights_pb2.PublishOrder, sender: BucketSender
    ) -> tuple[weights_pb2.Communicator | None, str]:
        """Announces the publish to the controller, on rank 0; returns a pair like `_agree`.

        The controller answers with the servers that take part; a missing one is a problem.
        """
        wanted = order.communicator.communicator_id
        communicator = order.communicator
        num_senders = len(self._published.weights.senders)
        if order.new_communicator:
            workers = sum(receiver.num_workers for receiver in order.receivers)
            try:
                communicator = sender.announce(
                    wanted, num_senders=num_senders, world_size=num_senders + workers
                )
            except WeightSyncError as error:
                return None, str(error)
        elif sender.communicator_id != wanted:
            return None, f"communicator {wanted} is gone: a new one is needed"
        answer = self._client.start_publish(
            trainer_pb2.PublishStart(
                publish_id=order.publish_id,
                layout=self._published.layout(adapters_alone=order.adapters_alone),
                communicator=communicator,
            ),
            join_deadline_s=order.join_deadline_s,
        )
        if not answer.receivers:
            return None, ""
        lost = {r.server_id for r in order.receivers} - {r.server_id for r in answer.receivers}
        if lost:
            # A communicator with a missing member can neither be joined nor used.
            return None, f"{', '.join(sorted(lost))} did not take part"
        return communicator, ""

    def _connect(
        self,
        order: weights_pb2.PublishOrder,
        announced: weights_pb2.Communicator,
        sender: BucketSender,
    ) -> str:
        """Joins the new communicator; returns the first problem of any rank, or ""."""
        place, problem = self._published.weights.sender, ""
        if place is not None:
            try:
                with self._listening(order) as abandoned:
                    sender.connect(announced, place, abandoned)
            except WeightSyncError as error:
                # A sender that stopped because another sender failed has nothing to add. The
                # first one that fails informs the other senders, which still wait.
                if not self._ranks.flags.is_set(_abandoned(order)):
                    problem = str(error)
                    self._ranks.flags.set(_abandoned(order))
        problem = self._first_problem(problem)
        if problem and self._ranks.is_main:
            self._ranks.flags.clear(_abandoned(order))
        return problem

    @contextlib.contextmanager
    def _listening(self, order: weights_pb2.PublishOrder) -> Iterator[threading.Event]:
        """Yields an event that is set if a member is lost; no sender then waits for its deadline.

        Rank 0 asks the controller. Senders inform each other, because NCCL does not.
        """
        abandoned, is_over = threading.Event(), threading.Event()

        def is_abandoned() -> bool:
            if self._ranks.flags.is_set(_abandoned(order)):
                return True
            return self._ranks.is_main and not self._client.has_all_receivers(
                order.publish_id, len(order.receivers)
            )

        def listen() -> None:
            while not is_over.wait(_ASK_PERIOD_S):
                if is_abandoned():
                    abandoned.set()
                    return

        threading.Thread(target=listen, name="publish-question", daemon=True).start()
        try:
            yield abandoned
        finally:
            is_over.set()

    def _deliver(
        self,
        order: weights_pb2.PublishOrder,
        result: trainer_pb2.PublishResult,
        sender: BucketSender,
    ) -> tuple[str, WeightDigests | None]:
        """Sends all buckets; returns the first problem of any rank, or "", and the digests."""
        sends = _Sends(sender if self._published.weights.sender is not None else None)
        digests = self._published.run(sends, adapters_alone=order.adapters_alone)
        wire = sends.finish()
        result.wire_s, result.wire_bytes = wire.seconds, wire.num_bytes
        return self._first_problem(sends.problem), digests

    def _first_problem(self, problem: str) -> str:
        """Returns the first problem of any rank, or "" if there is none; collective."""
        found = self._ranks.gather_bytes(problem.encode())
        return next((data.decode() for data in found if data), "")

    def _report(
        self, order: weights_pb2.PublishOrder, result: trainer_pb2.PublishResult, problem: str
    ) -> None:
        """Reports the result to the controller on rank 0; all ranks abort a broken communicator."""
        data = None
        if self._ranks.is_main:
            if problem:
                logger.warning(
                    "publish %s of version %s: %s", order.publish_id, order.version.step, problem
                )
                result.error = problem
            receipt = self._client.finish_publish(result)
            data = b"discard" if receipt.discard_communicator or problem else b""
        if self._ranks.broadcast_bytes(data):
            self._senders.abort()


class _Sends:
    """The sends of one publish; after the first problem no more buckets are sent."""

    def __init__(self, sender: BucketSender | None) -> None:
        self._sender = sender
        self.problem = ""

    def __call__(self, place: int, bucket: Bucket, data: Tensor) -> Release:
        """Implements `Send`: sends bucket number `place`."""
        sender, where = self._sender, f"bucket {place}: "
        release = None
        if sender is not None:
            release = self._tried(lambda: sender.send(bucket, data), where)
        return (lambda: None) if release is None else lambda: self._tried(release, where)

    def finish(self) -> Wire:
        """Waits until every bucket is sent; the result is empty without a sender or on failure."""
        return (self._sender and self._tried(self._sender.finish)) or Wire()

    def _tried(self, act: Callable[[], Result], where: str = "") -> Result | None:
        """Returns the result of `act`, or None if this or an earlier call failed.

        The first WeightSyncError is noted as `problem`, with the prefix `where`; later calls skip
        `act`.
        """
        if self.problem:
            return None
        try:
            return act()
        except WeightSyncError as error:
            self.problem = f"{where}{error}"
            return None


def _abandoned(order: weights_pb2.PublishOrder) -> str:
    """Returns the name of the rank flag that marks the publish of `order` as abandoned.

    The name has the publish id, not the communicator id, which is secret.
    """
    return f"abandoned/{order.publish_id}"


NUM_SEQUENCES = 8
MAX_TOKENS = 256


def probe_sequences(batch: Batch | None, *, vocab_size: int, max_tokens: int) -> list[TokenArray]:
    """Returns up to 8 sequences of 2 to `max_tokens` tokens; pseudo-random ones without a batch."""
    if batch is None:
        random = np.random.default_rng(0)
        lengths = np.linspace(8, 32, NUM_SEQUENCES).astype(int).clip(2, max_tokens)
        return [random.integers(0, vocab_size, n).astype(np.uint32) for n in lengths]
    sequences = [t.token_ids[part.tokens] for t in batch.trajectories for part in t.sequences()]
    long_enough = [token_ids for token_ids in sequences if len(token_ids) >= 2]
    stride = max(1, len(long_enough) // NUM_SEQUENCES)
    chosen = long_enough[::stride][:NUM_SEQUENCES]
    return [token_ids[:max_tokens] for token_ids in chosen]


def build_probe(policy: Policy, batch: Batch | None, config: Config) -> weights_pb2.Probe:
    """Returns the probe: sequences with their log-probabilities under the current weights.

    The probe is the same on every rank, and has separate sequences for each adapter. Collective.
    """
    # The engine wants room for one more token.
    room = min(policy.max_positions, config.sampling.max_episode_tokens) - 1
    names = policy.adapters.names
    parts = {} if batch is None else dict(batch.by_adapter(names))
    sequences: list[TokenArray] = []
    logprobs, adapters = [], []
    for name in names:
        own = probe_sequences(
            parts.get(name), vocab_size=policy.vocab_size, max_tokens=max(2, min(MAX_TOKENS, room))
        )
        with policy.adapters.active(name):
            found = sequence_logprobs(policy, own, max_tokens=config.learner.micro_batch_tokens)
        sequences += own
        logprobs += found
        adapters += [name] * len(own)
    return weights_pb2.Probe(
        token_ids=pack_tokens(np.concatenate(sequences)),
        lengths=[len(token_ids) for token_ids in sequences],
        expected_logprobs=pack_logprobs(np.concatenate(logprobs)),
        tolerance=config.probe_tolerance,
        adapters=adapters if policy.adapters.have_names else (),
    )
