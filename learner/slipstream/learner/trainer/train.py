"""The trainer's loop, which gets orders from the controller and follows them on all ranks.

Only rank 0 calls the controller. It broadcasts the orders, so that all ranks take the same branch.

    rank 0: Next --- order ---> broadcast ---> every rank
      ^                                         | PublishOrder  send the buckets of the weights
      |                                         | any order     publish a checkpoint that is written
      |                                         | StoreOrder    copy the weights, to be written
      |                                         | Pass          compute gradients that stay
      |                                         | SaveOrder     save now
      |                                         | Batch         train, export, report, save if due
      +------- next order --------------------- | WaitOrder     nothing
                                                | StopOrder     last checkpoint, final model, end

    who waits             for what                            who ends the wait
    rank 0                the next order                      the controller, or SIGTERM
    other ranks           rank 0's broadcast                  rank 0, or `learner.timeout_s`
    senders               members of a new communicator       the servers, or a deadline
    senders               a bucket's receivers                the servers, or `bucket_deadline_s`
    rank 0                loaded weights (FinishPublish)      the controller
    nobody                files of a checkpoint or version    their threads; the loop asks each turn
"""

import contextlib
import functools
import logging
import math
import os
import signal
import socket
from types import FrameType

from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.logs import note_step
from slipstream.core.run_folder import CHECKPOINTS, FINAL_ADAPTERS, FINAL_MODEL
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer import controller_client
from slipstream.learner.trainer.batches.batch import Batch, Order, on_every_rank, read_order
from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer, Saved
from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.opening import load_start
from slipstream.learner.trainer.parts import open_writer, step_parts
from slipstream.learner.trainer.passes import Passes
from slipstream.learner.trainer.step import TrainingStep
from slipstream.learner.trainer.step_cost import StepCost
from slipstream.learner.trainer.weights.bucket_senders import make_sender
from slipstream.learner.trainer.weights.export import save_adapters, save_hf_folder
from slipstream.learner.trainer.weights.periodic_export import PeriodicExport
from slipstream.learner.trainer.weights.run_chat import RunChat
from slipstream.learner.trainer.weights.weight_publisher import (
    WeightPublisher,
    build_probe,
    open_published,
)
from slipstream.learner.trainer.weights.weight_stream import WeightDigests
from slipstream.protocol.codec import version_from_pb, version_to_pb
from slipstream.protocol.weights.handover import host_id
from slipstream.protocol.weights.nccl_group import agreed_settings
from slipstream.v1 import trainer_pb2, trajectory_pb2, weights_pb2

logger = logging.getLogger(__name__)

# A report has the advantages of at most so many trajectories, to bound the message.
_MOST_TOLD = 65536
# Largest number of groups in a report; if more are faulty, the whole batch is set aside.
MAX_NAMED_GROUPS = 4096


class Trainer:
    """One rank of the trainer; every method is collective, but only rank 0 uses `client`."""

    def __init__(
        self, config: Config, policy: Policy, client: controller_client.ControllerClient
    ) -> None:
        self._config = config
        self._policy = policy
        self._ranks = policy.ranks
        self._client = client
        # Read now: the files may change before the end. Only the main rank writes them.
        self._chat = RunChat.of(config) if self._ranks.is_main else RunChat()
        self._parts = step_parts(config, policy)
        self._step = TrainingStep(policy, config, self._parts)
        other_models = [model for part in self._parts for model in part.models().values()]
        self._memories = [model.memory for model in (policy, *other_models)]
        self.stages = self._step.stages
        self._cost = StepCost(config, policy)
        stored = [model for part in self._parts for model in part.stored_models()]
        self._checkpointer = Checkpointer(
            config,
            self._ranks,
            [*stored_policy(policy), *stored],
            adapters=policy.adapters.sizes,
        )
        start = functools.partial(load_start, policy, config)
        self._passes = Passes(policy, self._checkpointer.load, start)
        with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            loaded = self._checkpointer.load_newest()
        self._version = PolicyVersion(0, 0) if loaded is None else loaded.version
        self._tell_parts()
        self._last_batch: Batch | None = None
        self._published = open_published(policy, config)
        make = functools.partial(
            make_sender,
            weights=config.weights,
            device=policy.ranks.device,
            largest_bucket=self._published.largest_bucket,
            host=config.learner.host,
        )
        self._publisher = WeightPublisher(self._published, make, ranks=self._ranks, client=client)
        self._writer = open_writer(config, policy, self._published, client)
        self._digests = self._export()
        self._periodic = PeriodicExport(config, policy, self._chat)
        # A version whose folder a crash has cut off, if its checkpoint is the newest.
        self._periodic.export(self._version, self._digests.identity)
        self._settle()

    def run(self) -> None:
        """Follows the controller's orders until a stop order, or SIGTERM after the current one."""

        def terminate(signum: int, frame: FrameType | None) -> None:
            # The second SIGTERM kills; only rank 0 stops, and broadcasts the stop order.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._ranks.is_main:
                self._client.stop(controller_client.TERMINATED)

        signal.signal(signal.SIGTERM, terminate)
        self._register()
        # A batch must not outlive its step: the next one arrives while the loop waits.
        while self._follow():
            pass

    def _follow(self) -> bool:
        """Gets the next order and follows it; returns whether another one comes."""
        with self.stages.measure("waiting"):
            order = self._next_order()
        if isinstance(order, weights_pb2.PublishOrder):
            # First of all, because servers may already wait for the first bucket.
            with self.stages.measure("publish"):
                self._check_version(order.version, f"publish {order.publish_id}")
                self._publisher.run(order, self._probe() if order.verify else None)
                self._ranks.activity.note()
        with self.stages.measure("checkpoint"):
            self._tell(self._checkpointer.poll())
            self._periodic.poll()
        if isinstance(order, trainer_pb2.StoreOrder):
            with self.stages.measure("publish"):
                self._check_version(order.version, "a store order")
                if self._writer is None:
                    raise RunFailed("a version cannot be stored without weights.storage_url")
                # Every version has a probe: a server that joins needs one, whenever it does.
                self._writer.store(order, self._probe())
                self._ranks.activity.note()
        elif isinstance(order, trainer_pb2.Pass):
            report = self._passes.compute(order)
            if self._ranks.is_main:
                self._client.report_pass(report)
            self._ranks.activity.note()
        elif isinstance(order, trainer_pb2.SaveOrder):
            with self.stages.measure("checkpoint"):
                self._save()
                self._tell(self._checkpointer.finish())
        elif isinstance(order, Batch):
            note_step(order.step + 1)
            with contextlib.ExitStack() as stack:
                for part in self._parts:
                    stack.enter_context(part.around(order.step + 1))
                self._train(order)
        elif isinstance(order, trainer_pb2.StopOrder):
            self._finish(order)
            return False
        else:
            assert isinstance(order, (trainer_pb2.WaitOrder, weights_pb2.PublishOrder))
        return True

    def _register(self) -> None:
        has_experts = self._policy.chunks[0].config.num_moe_experts is not None
        layout = self._ranks.describe(has_experts=has_experts)
        place = weights_pb2.Place(
            host_id=host_id(), gpus=self._ranks.gpus, nccl=agreed_settings(os.environ)
        )
        places = self._ranks.gather_bytes(place.SerializeToString())
        if self._ranks.is_main:
            logger.info("%s", layout)
        while True:
            hello = trainer_pb2.TrainerHello(
                world_size=self._ranks.world_size,
                layout_description=layout,
                version=version_to_pb(self._version),
                weight_digest=self._digests.identity,
                num_parameters=self._published.weights.num_parameters,
                num_senders=len(self._published.weights.senders),
                places=[weights_pb2.Place.FromString(data) for data in places],
                process=f"host {socket.gethostname()}, process {os.getpid()}",
            )
            welcome = self._enter(hello) if self._ranks.is_main else None
            # No welcome is empty: it has an epoch.
            answer = self._ranks.broadcast_bytes(welcome)
            if answer:
                break
            self._load_newer()
        message = trainer_pb2.TrainerWelcome.FromString(answer)
        self._version = version_from_pb(message.version)
        self._tell_parts()
        if self._ranks.is_main:
            logger.info("registered for run %s with version %s", message.run_id, self._version)

    def _enter(self, hello: trainer_pb2.TrainerHello) -> bytes:
        """Registers on rank 0; returns the welcome, or b"" if these weights are outdated."""
        try:
            return self._client.register(hello).SerializeToString()
        except controller_client.Outdated as refusal:
            logger.warning("loading the newest checkpoint: %s", refusal)
            return b""

    def _load_newer(self) -> None:
        """Loads a newer checkpoint, which another trainer has written; collective."""
        with self._policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            # The other trainer may be writing the next one.
            loaded = self._checkpointer.load_newest(removes_partial=False)
        if loaded is None or loaded.version.step <= self._version.step:
            raise RunFailed(
                f"a trainer of version {self._version} needs batches that were removed, and there "
                f"is no newer checkpoint in {self._config.run_dir / CHECKPOINTS}"
            )
        self._version = loaded.version
        self._tell_parts()
        self._digests = self._export()
        self._settle()

    def _tell_parts(self) -> None:
        for part in self._parts:
            part.holds(self._version)

    def _settle(self) -> None:
        """Moves what was loaded to where it is between its uses; collective."""
        for memory in self._memories:
            with memory.resident(*MemoryPart):
                pass

    def _adopt(self, version: PolicyVersion) -> None:
        """Sets the version of the weights on all ranks to rank 0's `version`; collective."""
        data = version_to_pb(version).SerializeToString() if self._ranks.is_main else None
        message = trajectory_pb2.PolicyVersion.FromString(self._ranks.broadcast_bytes(data))
        self._version = version_from_pb(message)
        self._tell_parts()

    def _next_order(self) -> Order:
        # With offloaded parameters a publish begins only when the trainer can send: no server must
        # wait for a bucket while parameters come back from host memory.
        at_once = not self._config.learner.offload.parameters
        if at_once:
            self._published.fill_ahead()
        answer = None
        if self._ranks.is_main:
            answer = self._client.next(
                self._version,
                communicator_id=self._publisher.communicator_id,
                bucket_digests=self._digests.buckets if at_once else (),
                held_passes=self._passes.held(),
                can_store=self._writer is not None and self._writer.is_idle,
            )
        return read_order(on_every_rank(answer, self._ranks), self._step.share)

    def _train(self, batch: Batch) -> None:
        if batch.step != self._version.step:
            raise RunFailed(
                f"batch {batch.batch_id} is for step {batch.step + 1}, "
                f"but the weights are of version {self._version}"
            )
        with self._policy.memory.resident(MemoryPart.PARAMETERS):
            try:
                step = self._step if batch.given is None else self._passes
                result = step.run(batch)
            except UntrainableBatch as fault:
                self._set_aside(batch, fault)
                return
            version = PolicyVersion(self._version.incarnation, batch.step + 1)
            cost: dict[str, float] = {}
            if batch.given is None:
                self._last_batch = batch.without_experts()
                cost = self._cost.metrics(
                    batch,
                    wall_s=result.wall_s,
                    num_micro_batches=result.metrics["num_micro_batches"],
                )
            self._digests = self._export()
        self._ranks.activity.note()
        times = self.stages.take()
        exported: dict[str, float] = {}
        if self._periodic.newest is not None:
            exported["exported_version"] = float(self._periodic.newest)
        if self._ranks.is_main:
            version = self._client.report_step(
                trainer_pb2.StepReport(
                    step=batch.step,
                    batch_id=batch.batch_id,
                    version=version_to_pb(version),
                    weight_digest=self._digests.identity,
                    metrics=result.metrics | cost | times | exported,
                    wall_s=result.wall_s,
                    advantages=[
                        result.advantages.get(trajectory.trajectory_id, math.nan)
                        for trajectory in batch.trajectories[:_MOST_TOLD]
                    ],
                )
            )
        self._adopt(version)
        if self._checkpointer.is_due(self._version.step):
            with self.stages.measure("checkpoint"):
                self._save()
        with self.stages.measure("checkpoint"):
            self._periodic.export(self._version, self._digests.identity)

    def _set_aside(self, batch: Batch, fault: UntrainableBatch) -> None:
        """Has the batch set aside; else raises `fault`, or StartAgain if weights have changed."""
        answer = b""
        if self._ranks.is_main:
            ids = set(fault.trajectory_ids)
            groups = dict.fromkeys(t.group_id for t in batch.trajectories if t.trajectory_id in ids)
            data = trainer_pb2.DataFault(
                step=batch.step,
                batch_id=batch.batch_id,
                group_ids=groups if len(groups) <= MAX_NAMED_GROUPS else (),
            )
            failure = trainer_pb2.TrainerFailure(message=str(fault), data=data)
            logger.warning("batch %s of step %d: %s", batch.batch_id, batch.step + 1, fault)
            answer = b"set aside" if self._client.set_batch_aside(failure) else b"refused"
        if self._ranks.broadcast_bytes(answer if self._ranks.is_main else None) != b"set aside":
            raise fault
        if self._step.num_updates:
            raise StartAgain(
                f"step {batch.step + 1} changed weights before it failed ({fault}): the trainer "
                "starts again from its newest checkpoint"
            )
        self._ranks.activity.note()

    def _save(self) -> None:
        # A run that goes on from this checkpoint does not make earlier versions again.
        self._periodic.finish()
        with contextlib.ExitStack() as stack:
            for memory in self._memories:
                stack.enter_context(memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER))
            saved = self._checkpointer.save(self._version, self._digests.identity)
        self._tell(saved)

    def _tell(self, saved: Saved | None) -> None:
        if saved is not None:
            self._client.report_checkpoint(
                trainer_pb2.CheckpointReport(
                    version=version_to_pb(saved.manifest.version),
                    weight_digest=bytes.fromhex(saved.manifest.weight_digest),
                    path=str(saved.path),
                    num_bytes=saved.manifest.num_bytes,
                    wall_s=saved.wall_s,
                )
            )

    def _check_version(self, version: trajectory_pb2.PolicyVersion, order: str) -> None:
        if version_from_pb(version) != self._version:
            raise RunFailed(
                f"{order} wants version {version.step}, but the weights are of version "
                f"{self._version}"
            )

    def _probe(self) -> weights_pb2.Probe:
        return build_probe(self._policy, self._last_batch, self._config)

    def _finish(self, order: trainer_pb2.StopOrder) -> None:
        for part in self._parts:
            part.close()
        logger.info("stopping with version %s: %s", self._version, order.reason)
        if self._checkpointer.is_due(self._version.step, is_last=True):
            self._save()
        self._tell(self._checkpointer.finish())
        self._periodic.finish()
        export_path = ""
        if self._config.learner.export_final and not order.without_model:
            folder = self._config.run_dir / CHECKPOINTS
            target = folder / (FINAL_ADAPTERS if self._config.lora.adapters else FINAL_MODEL)
            if not self._config.lora.adapters:
                save_hf_folder(self._policy, self._config.model.path, target, self._chat)
            if self._config.lora.rank:
                save_adapters(self._policy, self._config, folder / FINAL_ADAPTERS, self._chat)
            export_path = str(target)
        self._publisher.abort()
        if self._writer is not None:
            self._writer.close(keep=order.reason == controller_client.TERMINATED)
        if self._ranks.is_main:
            self._client.finish(
                trainer_pb2.TrainerGoodbye(
                    weight_digest=self._digests.identity, export_path=export_path
                )
            )

    def _export(self) -> WeightDigests:
        with self.stages.measure("export"):
            return self._published.digests()


class StartAgain(Exception):  # noqa: N818
    """Raised if a step fails after it changed weights: the trainer restarts from a checkpoint."""
