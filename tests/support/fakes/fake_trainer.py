"""A trainer without a model: speaks the real protocol and makes the next version at once."""

import asyncio
import hashlib
import time
from collections.abc import Callable

import grpc.aio
import numpy as np
from slipstream.core.types import PolicyVersion, Trajectory
from slipstream.protocol import codec
from slipstream.protocol.rich_errors import Reason, has_reason
from slipstream.v1 import trainer_pb2, trainer_pb2_grpc, weights_pb2

from support.fakes.fake_server import LAYOUT, bucket_digests
from support.fakes.named_channel import OPEN, open_named
from support.rigs.waiting import until

Checkpoint = tuple[PolicyVersion, bytes]
PROBE = weights_pb2.Probe(
    token_ids=codec.pack_tokens(np.arange(4, dtype=np.uint32)),
    lengths=[4],
    expected_logprobs=codec.pack_logprobs(np.full(3, -2.0, np.float32)),
    tolerance=1e-3,
)
START: Checkpoint = (PolicyVersion(0, 0), b"the weights of the start")


def trained(digest: bytes, batch: list[Trajectory], noise: bytes = b"") -> bytes:
    """What training makes of weights: it depends on everything that is trained, and its order."""
    state = hashlib.blake2b(digest + noise, digest_size=16)
    for trajectory in batch:
        state.update(trajectory.trajectory_id.rsplit(".", 2)[0].encode())
        state.update(
            trajectory.token_ids.tobytes() + trajectory.behavior_logprobs.tobytes()
        )
        state.update(f"{trajectory.reward} {trajectory.version_spans}".encode())
    return state.digest()


class TrainerDied(Exception):
    """A fake trainer met the order of which it dies."""


class FakeTrainer:
    # Those of its calls.
    credentials = OPEN

    def __init__(
        self,
        address: str,
        *,
        step_s: float = 0.0,
        checkpoint: Checkpoint = START,
        checkpoint_every: int = 0,
    ) -> None:
        """Goes on from `checkpoint`; every n-th version becomes `newest_checkpoint`."""
        self.address = address
        self.step_s = step_s
        self.version, self.digest = checkpoint
        self.newest_checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        # The limit of a call for the next order, and how many of them were told to wait.
        self.call_timeout_s = 60.0
        self.num_waits = 0
        self.export_path = "checkpoints/final"
        # Changes the weights that a step makes, as rounding on a GPU does.
        self.noise = b""
        # The devices of its ranks; a fake server's place is the empty one.
        self.places: list[weights_pb2.Place] = []
        self.batches: list[list[Trajectory]] = []
        self.published: list[PolicyVersion] = []
        # Versions that it was told to write to storage, and why it cannot.
        self.stored: list[PolicyVersion] = []
        self.storage_error = ""
        self.lags: list[int] = []
        # Passes by id, each once, since the newest step; those of the newest batch; steps that a
        # client has ordered.
        self.computed: dict[str, trainer_pb2.Pass] = {}
        self.given: list[trainer_pb2.Pass] = []
        self.ordered: list[tuple[trainer_pb2.GivenStep, list[str]]] = []
        self.stop_reason = ""
        self.communicator_id = ""
        # Says which groups of a batch it cannot train, an empty list for all, None for a good one.
        self.poisoned: Callable[[list[Trajectory]], list[str] | None] = lambda _: None
        self.refused: list[str] = []
        # The kind of order that ends it, as a lack of memory would.
        self.dies_of = ""
        # Since the step before.
        self._waiting_s = self._publish_s = 0.0
        # Steps from this one on wait for the gate.
        self.gated_from = 0
        # A batch that it was given waits for the gate, or did.
        self.holds = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self) -> None:
        async with open_named(self.address, credentials=self.credentials) as channel:
            self.stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            hello = trainer_pb2.TrainerHello(
                world_size=1,
                layout_description="on 1 rank",
                version=codec.version_to_pb(self.version),
                weight_digest=self.digest,
                places=self.places,
            )
            welcome = await self._register(hello)
            self.version = codec.version_from_pb(welcome.version)
            self.epoch = ((codec.TRAINER_EPOCH, str(welcome.trainer_epoch)),)
            self.place = self.stub.KeepPlace(
                trainer_pb2.PlaceRequest(), metadata=self.epoch
            )
            await self.place.read()
            while not self.stop_reason:
                request = trainer_pb2.NextRequest(
                    version=codec.version_to_pb(self.version),
                    communicator_id=self.communicator_id,
                    bucket_digests=bucket_digests(LAYOUT),
                    can_store=True,
                )
                started_s = time.monotonic()
                answer = self.stub.Next(
                    request, timeout=self.call_timeout_s, metadata=self.epoch
                )
                directives = [d async for d in answer]
                self._waiting_s += time.monotonic() - started_s
                await self._follow(directives)
            await self.export()
            goodbye = trainer_pb2.TrainerGoodbye(
                weight_digest=self.digest, export_path=self.export_path
            )
            await self.stub.Finish(goodbye, timeout=60, metadata=self.epoch)

    async def _register(
        self, hello: trainer_pb2.TrainerHello
    ) -> trainer_pb2.TrainerWelcome:
        while True:
            try:
                return await self.stub.Register(hello, wait_for_ready=True, timeout=60)
            except grpc.aio.AioRpcError as error:
                if not has_reason(error, Reason.PLACE_TAKEN):
                    raise
            await asyncio.sleep(0.05)

    async def _follow(self, directives: list[trainer_pb2.Directive]) -> None:
        first = directives[0]
        kind = first.WhichOneof("directive")
        if kind == self.dies_of:
            # The real one tells its cause, then its ranks start again.
            failure = trainer_pb2.TrainerFailure(message="no memory")
            await self.stub.ReportFailure(failure, timeout=60, metadata=self.epoch)
            raise TrainerDied(kind)
        match kind:
            case "batch":
                self.given = [
                    client_pass
                    for d in directives[1:]
                    for client_pass in d.chunk.passes
                ]
                messages = [t for d in directives[1:] for t in d.chunk.trajectories]
                await self._train(
                    first.batch, [codec.trajectory_from_pb(m) for m in messages]
                )
            case "publish":
                started_s = time.monotonic()
                await self._publish(first.publish)
                self._publish_s += time.monotonic() - started_s
            case "compute":
                await self._compute(first.compute)
            case "save":
                await self._save()
            case "store":
                await self._store(first.store)
            case "wait":
                self.num_waits += 1
            case "stop":
                self.stop_reason = first.stop.reason

    async def export(self) -> None:
        """Between the order to stop and the goodbye."""

    async def train(self) -> None:
        """In a step."""

    async def sign(self) -> None:
        await self.stub.ReportWork(
            trainer_pb2.WorkReport(), timeout=60, metadata=self.epoch
        )

    def hold_at(self, step: int) -> None:
        """The steps before `step` are trained; the others wait until `gate` is set."""
        self.gated_from = step
        self.gate.clear()

    async def until_held(self) -> None:
        """Waits until every step before `gated_from` is trained."""
        await until(lambda: self.version.step >= self.gated_from)

    async def _train(
        self, header: trainer_pb2.BatchHeader, batch: list[Trajectory]
    ) -> None:
        if header.step >= self.gated_from:
            self.holds = True
            await self.gate.wait()
        await asyncio.sleep(self.step_s)
        await self.train()
        assert len(batch) == header.num_trajectories
        assert header.step == self.version.step
        faulty = self.poisoned(batch)
        if faulty is not None:
            await self._refuse(header, faulty)
            return
        lags = [header.step - s.version.step for t in batch for s in t.version_spans]
        self.lags += lags
        self.batches.append(batch)
        self.version = PolicyVersion(self.version.incarnation, header.step + 1)
        self.digest = trained(self.digest, batch, self.noise)
        if header.HasField("given"):
            self.ordered.append(
                (header.given, [client_pass.id for client_pass in self.given])
            )
            self.digest = trained(self.digest, [], header.given.SerializeToString())
            self.computed.clear()
        tokens = sum(t.num_sampled_tokens for t in batch)
        report = trainer_pb2.StepReport(
            step=header.step,
            batch_id=header.batch_id,
            version=codec.version_to_pb(self.version),
            weight_digest=self.digest,
            metrics={
                "trained_tokens": tokens,
                "waiting_s": self._waiting_s,
                "publish_s": self._publish_s,
            },
            wall_s=self.step_s,
        )
        self._waiting_s = self._publish_s = 0.0
        receipt = await self.report(report)
        self.version = codec.version_from_pb(receipt.version)
        if self.checkpoint_every and self.version.step % self.checkpoint_every == 0:
            await self._save()

    async def _compute(self, one: trainer_pb2.Pass) -> None:
        self.computed.setdefault(one.id, one)
        logprobs = [
            np.full(len(s.targets) // 4, -1.5, "<f4").tobytes() for s in one.sequences
        ]
        report = trainer_pb2.PassReport(
            id=one.id,
            logprobs=logprobs,
            metrics={"loss:sum": float(len(one.sequences))},
        )
        await self.stub.ReportPass(report, timeout=60, metadata=self.epoch)

    async def _save(self) -> None:
        self.newest_checkpoint = (self.version, self.digest)
        await self.stub.ReportCheckpoint(
            trainer_pb2.CheckpointReport(
                version=codec.version_to_pb(self.version), weight_digest=self.digest
            ),
            timeout=60,
            metadata=self.epoch,
        )

    async def _refuse(
        self, header: trainer_pb2.BatchHeader, group_ids: list[str]
    ) -> None:
        """Reports a data fault like the real trainer: stops unless the batch is set aside."""
        fault = trainer_pb2.DataFault(
            step=header.step, batch_id=header.batch_id, group_ids=group_ids
        )
        failure = trainer_pb2.TrainerFailure(message="the loss is nan", data=fault)
        self.refused.append(header.batch_id)
        receipt = await self.stub.ReportFailure(
            failure, timeout=60, metadata=self.epoch
        )
        assert receipt == await self.stub.ReportFailure(
            failure, timeout=60, metadata=self.epoch
        )
        if not receipt.set_aside:
            self.stop_reason = "its batch cannot be trained"

    async def report(self, report: trainer_pb2.StepReport) -> trainer_pb2.StepReceipt:
        return await self.stub.ReportStep(report, timeout=60, metadata=self.epoch)

    async def _store(self, order: trainer_pb2.StoreOrder) -> None:
        self.stored.append(codec.version_from_pb(order.version))
        report = trainer_pb2.StoredReport(
            version=order.version,
            folder=order.folder,
            error=self.storage_error,
            stored=weights_pb2.StoredWeights(key=f"{order.folder}/manifest"),
            bucket_digests=bucket_digests(LAYOUT),
            probe=PROBE,
            num_bytes=10,
            whole_bytes=100,
        )
        await self.stub.ReportStored(report, timeout=60, metadata=self.epoch)

    async def _publish(self, order: weights_pb2.PublishOrder) -> None:
        if not order.begun:
            start = trainer_pb2.PublishStart(
                publish_id=order.publish_id,
                layout=LAYOUT,
                communicator=order.communicator,
            )
            started = await self.stub.StartPublish(
                start, timeout=60, metadata=self.epoch
            )
            if not started.receivers:
                return
        self.communicator_id = order.communicator.communicator_id
        self.published.append(codec.version_from_pb(order.version))
        probe = PROBE if order.verify else None
        receipt = await self.stub.FinishPublish(
            trainer_pb2.PublishResult(
                publish_id=order.publish_id,
                bucket_digests=bucket_digests(LAYOUT),
                probe=probe,
            ),
            timeout=60,
            metadata=self.epoch,
        )
        if receipt.discard_communicator:
            self.communicator_id = ""
