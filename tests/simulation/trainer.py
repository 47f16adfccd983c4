"""A trainer whose weights are a digest of all that it trained; its calls are the product's.

Its code blocks, as that of the product does: `run` is to be called in a thread of `blocking`.
"""

import functools
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import RunFailed, SlipstreamError
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion, Trajectory
from slipstream.extensions.stored_weights.trainer import StorageWriter
from slipstream.learner.trainer.batches.batch import Batch, read_order
from slipstream.learner.trainer.controller_client import (
    TERMINATED,
    ControllerClient,
    ControllerLost,
    Outdated,
)
from slipstream.learner.trainer.ranks.activity import Activity, signs_of_life
from slipstream.protocol.checkpoints import MANIFEST_NAME, checkpoint_path
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import weights_pb2
from support.fakes.fake_server import LAYOUT
from support.fakes.fake_trainer import PROBE

from simulation import storage
from simulation.fleet import Wire, bucket_digests

START_WEIGHTS = b"the first weight"


@dataclass
class Truth:
    """What trainers did, kept outside of the product: survives every kill."""

    # The newest checkpoint, which a trainer that starts loads.
    checkpoint: tuple[PolicyVersion, bytes] = (PolicyVersion(0, 0), START_WEIGHTS)
    # The weights that trainers called by a version.
    weights: dict[PolicyVersion, set[bytes]] = field(
        default_factory=lambda: {PolicyVersion(0, 0): {START_WEIGHTS}}
    )

    def holds(self, weights: bytes) -> bool:
        """Whether any version has these weights."""
        return any(weights in digests for digests in self.weights.values())


class SimulatedTrainer:
    """One life of the trainer; `run` returns when it is told to stop."""

    def __init__(
        self,
        config: Config,
        name: str,
        wire: Wire,
        truth: Truth,
        *,
        seed: str,
        alive: Callable[[str], bool],
        checkpoint_every: int,
        noise: bool,
    ) -> None:
        self.client = ControllerClient(config)
        self._config = config
        self._name = name
        self._wire = wire
        self._truth = truth
        self._random = random.Random(f"trainer/{seed}")
        self._alive = alive
        self._checkpoint_every = checkpoint_every
        self._noise = self._random.randbytes(4) if noise else b""
        self.version, self.weights = truth.checkpoint
        self._saving: tuple[PolicyVersion, bytes] | None = None
        self._activity = Activity()
        self._communicator = ""
        # Whether it was told to leave.
        self.is_leaving = False
        self._writer: StorageWriter | None = None
        if config.weights.storage_url is not None:
            published: Any = storage.Published(lambda: self.weights)
            self._writer = StorageWriter(
                published, config.weights, ranks=storage.RANKS, client=self.client
            )

    def run(self) -> None:
        """Works like the program of a rank, which reports each failure but a lost controller."""
        tell = functools.partial(self.client.report_work, self._activity)
        try:
            with signs_of_life(self._activity, tell, period_s=5.0):
                self._follow()
        except ControllerLost:
            raise
        except Exception as error:
            failure = pb.TrainerFailure(message=f"{type(error).__name__}: {error}")
            failure.final = isinstance(error, SlipstreamError)
            self.client.report_failure(failure)
            raise
        self.client.close()

    def _follow(self) -> None:
        self._register()
        while True:
            directives = self.client.next(
                self.version,
                communicator_id=self._communicator,
                bucket_digests=bucket_digests(self.weights),
                can_store=self._writer is not None and self._writer.is_idle,
            )
            order = read_order(directives, lambda _: frozenset())
            if isinstance(order, Batch):
                self._train(order)
            elif isinstance(order, weights_pb2.PublishOrder):
                self._publish(order)
            elif isinstance(order, pb.StoreOrder):
                assert version_from_pb(order.version) == self.version
                self._writer.store(order, PROBE)
            elif isinstance(order, pb.StopOrder):
                self._finish(order)
                return
            self._activity.note()

    def _register(self) -> None:
        """Registers as the program does, which loads the newest checkpoint if it must."""
        while True:
            hello = pb.TrainerHello(
                world_size=1,
                layout_description="on 1 rank",
                version=version_to_pb(self.version),
                weight_digest=self.weights,
                process=self._name,
            )
            try:
                welcome = self.client.register(hello)
                break
            except Outdated:
                newest, weights = self._truth.checkpoint
                if newest.step <= self.version.step:
                    raise RunFailed("there is no newer checkpoint") from None
                self.version = newest
                self.weights = weights
        self._adopt(version_from_pb(welcome.version))

    def _adopt(self, version: PolicyVersion) -> None:
        self.version = version
        self._truth.weights.setdefault(self.version, set()).add(self.weights)

    def _train(self, batch: Batch) -> None:
        assert batch.step == self.version.step
        self._save()
        time.sleep(self._random.uniform(0.05, 0.5))
        faulty = sorted({group for group in batch.group_ids if not is_trainable(group)})
        if faulty:
            fault = pb.DataFault(
                step=batch.step, batch_id=batch.batch_id, group_ids=faulty
            )
            failure = pb.TrainerFailure(message="its data are bad", data=fault)
            if not self.client.set_batch_aside(failure):
                raise RunFailed("the batch was not set aside")
            return
        self.weights = trained(self.weights, batch.trajectories, self._noise)
        version = PolicyVersion(self.version.incarnation, batch.step + 1)
        report = pb.StepReport(
            step=batch.step,
            batch_id=batch.batch_id,
            version=version_to_pb(version),
            weight_digest=self.weights,
            metrics={
                "trained_tokens": sum(t.num_sampled_tokens for t in batch.trajectories)
            },
            wall_s=0.1,
        )
        self._adopt(self.client.report_step(report))
        if self._checkpoint_every and self.version.step % self._checkpoint_every == 0:
            self._saving = (self.version, self.weights)
            if self._config.checkpoint.keep_batches:
                self._save()

    def _save(self) -> None:
        """Ends the save that goes on; where batches are removed, the next one is given by then."""
        saved = self._saving
        self._saving = None
        if saved is None:
            return
        self._truth.checkpoint = saved
        version, weights = saved
        if not self._config.checkpoint.keep_batches:
            # The controller looks which there are.
            path = checkpoint_path(self._config.run_dir / CHECKPOINTS, version.step)
            path.mkdir(parents=True, exist_ok=True)
            (path / MANIFEST_NAME).touch()
        checkpoint = pb.CheckpointReport(
            version=version_to_pb(version), weight_digest=weights
        )
        self.client.report_checkpoint(checkpoint)

    def _publish(self, order: weights_pb2.PublishOrder) -> None:
        assert version_from_pb(order.version) == self.version
        result = pb.PublishResult(publish_id=order.publish_id)
        if order.new_communicator:
            self._communicator = ""
        problem = ""
        if not order.begun:
            if not order.new_communicator and self._communicator != (
                order.communicator.communicator_id
            ):
                problem = "the communicator is gone: a new one is needed"
            else:
                start = pb.PublishStart(
                    publish_id=order.publish_id,
                    layout=LAYOUT,
                    communicator=order.communicator,
                )
                started = self.client.start_publish(
                    start, join_deadline_s=order.join_deadline_s
                )
                if not started.receivers:
                    return
                if len(started.receivers) < len(order.receivers):
                    problem = "a server did not take part"
        problem = problem or self._send(order)
        if problem:
            result.error = problem
            self._communicator = ""
        else:
            result.bucket_digests.extend(bucket_digests(self.weights))
            if order.verify:
                result.probe.CopyFrom(PROBE)
        if self.client.finish_publish(result).discard_communicator:
            self._communicator = ""

    def _send(self, order: weights_pb2.PublishOrder) -> str:
        """Sends the weights; returns the first problem. One lost member fails all."""
        parcel = self._wire.parcel(order.publish_id)
        names = {r.server_id for r in order.receivers}
        until_s = time.monotonic() + order.join_deadline_s
        while not names <= {name.partition("/")[0] for name in parcel.joined}:
            if time.monotonic() > until_s:
                return "a server did not join in time"
            if not self.client.has_all_receivers(
                order.publish_id, len(order.receivers)
            ):
                return "a server is gone"
            time.sleep(0.2)
        self._communicator = order.communicator.communicator_id
        time.sleep(self._random.uniform(0.01, 0.2))
        until_s = time.monotonic() + order.bucket_deadline_s
        while self._wire.cut:
            if time.monotonic() > until_s:
                parcel.arrived.set()
                return "a bucket was not sent in time"
            time.sleep(0.2)
        if not all(self._alive(name) for name in parcel.joined):
            parcel.arrived.set()
            return "a member of the communicator is gone"
        parcel.weights = self.weights
        parcel.arrived.set()
        return ""

    def _finish(self, order: pb.StopOrder) -> None:
        self._truth.checkpoint = (self.version, self.weights)
        self.is_leaving = True
        if self._writer is not None:
            self._writer.close(keep=order.reason == TERMINATED)
        path = "" if order.without_model else "checkpoints/final"
        self.client.finish(
            pb.TrainerGoodbye(weight_digest=self.weights, export_path=path)
        )


def is_trainable(group_id: str) -> bool:
    """Whether the data of a group can be trained: the same in every life of the trainer."""
    return hashlib.blake2b(group_id.encode(), digest_size=1).digest()[0] % 16 != 1


def trained(weights: bytes, batch: Sequence[Trajectory], noise: bytes = b"") -> bytes:
    """What training makes of weights: it depends on all that is trained, and on its order."""
    state = hashlib.blake2b(weights + noise, digest_size=16)
    for trajectory in batch:
        state.update(trajectory.token_ids.tobytes() + f"{trajectory.reward}".encode())
    return state.digest()
