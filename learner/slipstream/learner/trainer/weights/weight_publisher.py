"""One publish on all ranks: rank 0 calls the controller, every sending rank sends its buckets.

A problem of any rank is a WeightSyncError on all ranks before they continue: then all abort, and
rank 0 reports the problem once. A rank that cannot send still takes part in filling buckets, as
others wait for it.

What is published is one stream of weights, or one of the base matrices and one of each adapter.
Matrices with adapters never change: a server needs them once, and later only the adapters.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import numpy as np
from slipstream.core.errors import RunFailed, WeightSyncError
from slipstream.core.settings.config import Config
from slipstream.core.types import TokenArray
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.policy import NamedAdapters, Policy
from slipstream.learner.trainer.model.schedule import sequence_logprobs
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.weights.bucket_fill import ExportedPart
from slipstream.learner.trainer.weights.bucket_senders import BucketSender
from slipstream.learner.trainer.weights.weight_stream import (
    Release,
    Send,
    WeightDigests,
    WeightStream,
    open_stream,
)
from slipstream.protocol.codec import pack_logprobs, pack_tokens
from slipstream.protocol.weights.buckets import Bucket, layout_to_pb
from slipstream.protocol.weights.nccl_group import Wire
from slipstream.v1 import trainer_pb2, weights_pb2
from torch import Tensor

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# Seconds between two checks that all members are still there.
_ASK_PERIOD_S = 0.5
# Most sequences of a probe, and most tokens of each.
NUM_SEQUENCES = 8
MAX_TOKENS = 256


class WeightPublisher:
    """Carries out publish orders; every method is collective."""

    def __init__(
        self,
        published: "Published",
        make_sender: Callable[[str], BucketSender],
        *,
        ranks: Ranks,
        client: ControllerClient,
    ) -> None:
        """Takes a function that makes this rank's sender of a transport, at its first use."""
        self._published = published
        self._make_sender = make_sender
        self._ranks = ranks
        self._client = client
        self._senders: dict[str, BucketSender] = {}
        self._sender: BucketSender | None = None

    @property
    def communicator_id(self) -> str:
        return "" if self._sender is None else self._sender.communicator_id or ""

    def run(self, order: weights_pb2.PublishOrder, probe: weights_pb2.Probe | None) -> None:
        """Carries out `order` with rank 0's `probe`; reports a failed transfer, raises nothing."""
        published = self._published
        alone = order.adapters_alone
        # Parameters move to the device before any member waits for a bucket and its deadline runs.
        with published.weights.resident():
            if order.new_communicator:
                # The previous communicator may use another transport.
                self.abort()
            self._sender = sender = self._sender_of(order.communicator.transport)
            sender.bucket_deadline_s = order.bucket_deadline_s
            try:
                communicator = order.communicator if order.begun else self._announce(order, sender)
                if communicator is None:
                    return
                started_s = time.monotonic()
                if order.new_communicator:
                    self._connect(order, communicator, sender)
                sends = _Sends(sender)
                digests = published.run(sends, adapters_alone=alone)
                wire = Wire() if published.weights.sender is None else sends.finish()
                self._agree(sends.problem)
                result = trainer_pb2.PublishResult(
                    publish_id=order.publish_id,
                    bucket_digests=digests.buckets,
                    probe=probe,
                    send_s=time.monotonic() - started_s,
                    bytes_sent=published.num_bytes(adapters_alone=alone),
                    wire_s=wire.seconds,
                    wire_bytes=wire.num_bytes,
                )
            except WeightSyncError as error:
                result = trainer_pb2.PublishResult(publish_id=order.publish_id, error=str(error))
            discard = None
            if self._ranks.is_main:
                if result.error:
                    version = order.version.step
                    logger.warning(
                        "publish %s of version %s: %s", order.publish_id, version, result.error
                    )
                receipt = self._client.finish_publish(result)
                discard = b"discard" if receipt.discard_communicator or result.error else b""
            if self._ranks.broadcast_bytes(discard):
                self.abort()

    def abort(self) -> None:
        """Aborts every communicator."""
        for sender in self._senders.values():
            sender.abort()

    def _sender_of(self, transport: str) -> BucketSender:
        if transport not in self._senders:
            self._senders[transport] = self._make_sender(transport)
        return self._senders[transport]

    def _announce(
        self, order: weights_pb2.PublishOrder, sender: BucketSender
    ) -> weights_pb2.Communicator | None:
        """Announces the publish to the controller, on rank 0; returns the communicator to use.

        The controller answers with the servers that take part; a missing one is a problem. Returns
        None if the controller has abandoned the publish.
        """
        communicator = order.communicator
        announced = b""
        problem = ""
        if self._ranks.is_main:
            communicator_id = communicator.communicator_id
            num_senders = len(self._published.weights.senders)
            try:
                if order.new_communicator:
                    workers = sum(receiver.num_workers for receiver in order.receivers)
                    communicator = sender.announce(
                        communicator_id, num_senders=num_senders, world_size=num_senders + workers
                    )
                elif sender.communicator_id != communicator_id:
                    raise WeightSyncError(
                        f"communicator {communicator_id} is gone: a new one is needed"
                    )
                start = trainer_pb2.PublishStart(
                    publish_id=order.publish_id,
                    layout=self._published.layout(adapters_alone=order.adapters_alone),
                    communicator=communicator,
                )
                limit_s = order.join_deadline_s
                receivers = self._client.start_publish(start, join_deadline_s=limit_s).receivers
                missing = {r.server_id for r in order.receivers} - {r.server_id for r in receivers}
                if receivers and missing:
                    # A communicator with a missing member can neither be joined nor used.
                    raise WeightSyncError(f"{', '.join(sorted(missing))} did not take part")
                announced = communicator.SerializeToString() if receivers else b""
            except WeightSyncError as error:
                problem = str(error)
        self._agree(problem)
        data = self._ranks.broadcast_bytes(announced if self._ranks.is_main else None)
        return weights_pb2.Communicator.FromString(data) if data else None

    def _connect(
        self,
        order: weights_pb2.PublishOrder,
        announced: weights_pb2.Communicator,
        sender: BucketSender,
    ) -> None:
        """Joins the new communicator, if this rank sends.

        No sender waits for its deadline once a member is lost: rank 0 asks the controller, and the
        senders inform each other by a flag, because NCCL does not.
        """
        # The name has the publish id, not the communicator id, which is secret.
        flags = self._ranks.flags
        flag = f"abandoned/{order.publish_id}"
        abandoned = threading.Event()
        is_over = threading.Event()

        def listen() -> None:
            ask = self._client.has_all_receivers
            number = len(order.receivers)
            while not is_over.wait(_ASK_PERIOD_S):
                if flags.is_set(flag) or (
                    self._ranks.is_main and not ask(order.publish_id, number)
                ):
                    abandoned.set()
                    return

        place = self._published.weights.sender
        problem = ""
        if place is not None:
            threading.Thread(target=listen, name="publish-question", daemon=True).start()
            try:
                sender.connect(announced, place, abandoned)
            except WeightSyncError as error:
                # A sender that stopped because another sender failed has nothing to add.
                if not flags.is_set(flag):
                    problem = str(error)
                    flags.set(flag)
            finally:
                is_over.set()
        self._agree(problem)

    def _agree(self, problem: str) -> None:
        """Raises the first problem of any rank that is not "" as WeightSyncError on all ranks."""
        if first_problem := next(filter(None, self._ranks.gather_bytes(problem.encode())), b""):
            raise WeightSyncError(first_problem.decode())


class _Sends:
    """The sends of one publish; after the first problem no more buckets are sent."""

    def __init__(self, sender: BucketSender) -> None:
        self._sender = sender
        self.problem = ""

    def __call__(self, place: int, bucket: Bucket, data: Tensor) -> Release:
        where = f"bucket {place}: "
        release = self._tried(lambda: self._sender.send(bucket, data), where)
        return None if release is None else lambda: self._tried(release, where)

    def finish(self) -> Wire:
        """Waits until every bucket is sent; the result is empty on failure."""
        return self._tried(self._sender.finish) or Wire()

    def _tried(self, act: Callable[[], Result], where: str = "") -> Result | None:
        """Returns the result of `act`, or None if this or an earlier call failed."""
        if not self.problem:
            try:
                return act()
            except WeightSyncError as error:
                self.problem = f"{where}{error}"
        return None


def probe_sequences(batch: Batch | None, *, vocab_size: int, max_tokens: int) -> list[TokenArray]:
    """Returns up to 8 sequences of 2 to `max_tokens` tokens; pseudo-random ones without a batch."""
    if batch is None:
        random = np.random.default_rng(0)
        lengths = np.linspace(8, 32, NUM_SEQUENCES).astype(int).clip(2, max_tokens)
        return [random.integers(0, vocab_size, n).astype(np.uint32) for n in lengths]
    sequences = [t.token_ids[part.tokens] for t in batch.trajectories for part in t.sequences]
    long_enough = [token_ids for token_ids in sequences if len(token_ids) >= 2]
    stride = max(1, len(long_enough) // NUM_SEQUENCES)
    probed = long_enough[::stride][:NUM_SEQUENCES]
    return [token_ids[:max_tokens] for token_ids in probed]


def build_probe(policy: Policy, batch: Batch | None, config: Config) -> weights_pb2.Probe:
    """Returns the probe of the current weights, of each adapter, equal on ranks; collective."""
    # The engine wants room for one more token.
    room = min(policy.max_positions, config.sampling.max_episode_tokens) - 1
    names = policy.adapters.names
    parts = {} if batch is None else dict(batch.by_adapter(names))
    sequences: list[TokenArray] = []
    logprobs = []
    adapters = []
    for name in names:
        adapter_sequences = probe_sequences(
            parts.get(name), vocab_size=policy.vocab_size, max_tokens=max(2, min(MAX_TOKENS, room))
        )
        with policy.adapters.published(name):
            adapter_logprobs = sequence_logprobs(policy, adapter_sequences)
        sequences += adapter_sequences
        logprobs += adapter_logprobs
        adapters += [name] * len(adapter_sequences)
    return weights_pb2.Probe(
        token_ids=pack_tokens(np.concatenate(sequences)),
        lengths=[len(token_ids) for token_ids in sequences],
        expected_logprobs=pack_logprobs(np.concatenate(logprobs)),
        tolerance=config.probe_tolerance,
        adapters=adapters if policy.adapters.have_names else (),
    )


class Published:
    """The published weights as streams with the same senders; passes over them are collective."""

    def __init__(
        self,
        weights: WeightStream,
        adapters: Mapping[str, WeightStream] | None = None,
        *,
        held: NamedAdapters | None = None,
        adapter_scale: float = 0.0,
    ) -> None:
        """Takes a stream of all weights, or of the base matrices if `adapters` has streams.

        `adapters` has a stream for each adapter of `held`, by name. Servers multiply an adapter's
        product by `adapter_scale` before they add it.
        """
        # All weights, or only the base matrices.
        self.weights = weights
        self._adapters = dict(adapters or {})
        self._held = held
        self._adapter_scale = adapter_scale
        # Digests by name of the matrices, which never change; empty before the first pass.
        self._unchanged: dict[str, bytes] = {}
        # The newest digests of each client's adapter.
        self._of_client: dict[str, WeightDigests] = {}

    @property
    def largest_bucket(self) -> int:
        return max(stream.largest_bucket for _, stream in self._parts(adapters_alone=False))

    def num_bytes(self, *, adapters_alone: bool) -> int:
        """Returns the bytes that a publish, perhaps of adapters alone, sends to each receiver."""
        return sum(stream.num_bytes for _, stream in self._parts(adapters_alone=adapters_alone))

    def layout(self, *, adapters_alone: bool) -> weights_pb2.WeightLayout:
        """Returns the layout, perhaps of adapters alone, by which receivers cut the buckets."""
        return layout_to_pb(
            () if adapters_alone else self.weights.tensors,
            self.weights.bucket_bytes,
            adapters=next((stream.tensors for stream in self._adapters.values()), ()),
            adapter_scale=self._adapter_scale,
            adapter_names=[name for name in self._adapters if name],
        )

    def fill_ahead(self) -> None:
        """Fills the first buckets ahead, of the first adapter if adapters are published apart."""
        if self._held is not None and self._held.are_clients:
            # The model holds values that are not published.
            return
        # Between two passes the first adapter is the active one.
        next(iter(self._adapters.values()), self.weights).fill_ahead()

    def run(self, send: Send | None = None, *, adapters_alone: bool = False) -> WeightDigests:
        """Makes a pass like `WeightStream.run` over all buckets, or those of adapters alone."""
        if not self._adapters:
            return self.weights.run(send)
        by_name: dict[str, bytes] = {}
        buckets: list[bytes] = []
        for name, stream in self._parts(adapters_alone=adapters_alone):
            adapters = None if name is None else self._held
            first = len(buckets)

            def numbered(
                place: int,
                bucket: Bucket,
                data: Tensor,
                first: int = first,
            ) -> Release:
                assert send is not None
                return send(first + place, bucket, data)

            with nullcontext() if adapters is None else adapters.published(name or ""):
                part = stream.run(None if send is None else numbered)
            # Tensors of another adapter have the same names.
            prefix = f"{name}/" if name else ""
            by_name |= {prefix + key: digest for key, digest in part.by_name.items()}
            buckets += part.buckets
            if name is None:
                before = self._unchanged or by_name.copy()
                # Servers that get only adapters keep the old matrices.
                if changed := sorted(key for key in by_name if before[key] != by_name[key]):
                    raise RunFailed(f"{changed[0]} is frozen, but changed during the run")
                self._unchanged = before
        return WeightDigests(by_name, tuple(buckets))

    def digests(self) -> WeightDigests:
        """Returns the digests of all tensors, without sending them.

        If adapters are published separately, the result's `buckets` has only the adapters' buckets,
        and the base matrices, which do not change, are read only at the first call. `by_name` also
        has the values of clients' adapters that are not published.
        """
        if not self._adapters:
            return self.run()
        if not self._unchanged:
            self.run()
        adapters = self._held
        if adapters is None or not adapters.are_clients:
            digests = self.run(adapters_alone=True)
            return replace(digests, by_name=self._unchanged | digests.by_name)
        # Adapters of clients are read only if they have changed.
        for name in sorted(adapters.changed):
            stream = self._adapters[name]
            with adapters.active(name):
                trained = stream.run().by_name
            with adapters.published(name):
                served = stream.run()
            by_name = {f"{name}/{key}": digest for key, digest in served.by_name.items()}
            by_name |= {f"{name}/trained/{key}": digest for key, digest in trained.items()}
            self._of_client[name] = replace(served, by_name=by_name)
        adapters.changed.clear()
        all_names = self._unchanged.copy()
        buckets = list[bytes]()
        for name in self._adapters:
            all_names |= self._of_client[name].by_name
            buckets += self._of_client[name].buckets
        return WeightDigests(all_names, tuple(buckets))

    def _parts(self, *, adapters_alone: bool) -> list[tuple[str | None, WeightStream]]:
        """Returns (adapter, stream) for each stream of a pass; adapter is None for `weights`."""
        assert self._adapters or not adapters_alone
        return [*([] if adapters_alone else [(None, self.weights)]), *self._adapters.items()]


def open_published(policy: Policy, config: Config) -> Published:
    """Returns the streams for the setting `lora.publish`; collective."""
    if not config.lora.publishes_adapters:
        return Published(open_stream(policy, config))
    matrices = open_stream(policy, config, ExportedPart.MATRICES)
    adapters_of_run = policy.adapters
    adapters = {}
    for name in adapters_of_run.names:
        # Adapters have memory of their own: buckets of one may travel while others are filled.
        with adapters_of_run.active(name):
            adapters[name] = open_stream(policy, config, ExportedPart.ADAPTERS, beside=matrices)
    # Adapters of clients have the factors of their products in them.
    scale = 1.0 if adapters_of_run.are_clients else config.lora.alpha / config.lora.rank
    return Published(matrices, adapters, held=adapters_of_run, adapter_scale=scale)
