"""A controller that follows a script: gives the trainer its orders and keeps its reports."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import NoReturn

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from slipstream.core.types import (
    Branch,
    GroupId,
    PolicyVersion,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.access.security import SERVER_OPTIONS
from slipstream.protocol.access.tokens import TOKEN_KEY
from slipstream.protocol.codec import (
    TRAINER_EPOCH,
    experts_to_pb,
    merge_spans,
    trajectory_to_pb,
    version_to_pb,
)
from slipstream.protocol.rich_errors import DETAILS_KEY, DOMAIN, Reason
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import trainer_pb2_grpc, weights_pb2

from support.fakes.plain_trajectory import plain_trajectory
from support.rigs.waiting import LIMIT_S

StartHook = Callable[[pb.PublishStart], list[weights_pb2.Receiver]]


class TokenGuard(grpc.ServerInterceptor):
    """Refuses calls without the token, as the real controller does; keeps the methods' names."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}"
        self.admitted: set[str] = set()
        self.refused: set[str] = set()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        name = handler_call_details.method.rpartition("/")[2]
        shown = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY)
        (self.admitted if shown == self._expected else self.refused).add(name)
        if shown == self._expected:
            return continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "no token"
            )
        )


class FakeController(trainer_pb2_grpc.TrainerServiceServicer):
    """Serves on a free port of the loopback as long as it is entered.

    `orders` are given one after the other, then it says wait. The connection breaks at None.
    `on_start_publish` answers which receivers take part; every call must carry `token` if there is
    one.
    """

    def __init__(
        self,
        orders: Iterable[Sequence[pb.Directive | None]],
        *,
        on_stored: Callable[[pb.StoredReport], None] = lambda report: None,
        on_start_publish: StartHook | None = None,
        token: str | None = None,
    ) -> None:
        self._orders = iter(orders)
        self._on_start_publish = on_start_publish
        self._on_stored = on_stored
        self._taking_part: list[weights_pb2.Receiver] = []
        # Answers the trainer, when asked: the receivers that still take part in the newest publish.
        self.still_there = lambda: self._taking_part
        self.guard = None if token is None else TokenGuard(token)
        guards = [self.guard] if self.guard else []
        # Without the controller's own options a trainer that waits long sends too many pings.
        self._server = grpc.server(
            futures.ThreadPoolExecutor(5), interceptors=guards, options=SERVER_OPTIONS
        )
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        # All that registered, and the epoch of the newest one; 0: it was started again since.
        self.hellos: list[pb.TrainerHello] = []
        self.epoch = 0
        # The reasons of its next refusals of a trainer, and what happens before each.
        self.refusals: list[Reason] = []
        self.on_refused: Callable[[], None] = lambda: None
        # Added to the timeline of each trainer.
        self.incarnation = 0
        self._forgotten = threading.Event()
        # Whether its streams end as those of a run that has failed.
        self.ends_in_order = False
        # Streams that kept the trainer's place.
        self.places = 0
        self.asked = threading.Event()
        self.requests: list[pb.NextRequest] = []
        self.steps: list[pb.StepReport] = []
        self.starts: list[pb.PublishStart] = []
        self.results: list[pb.PublishResult] = []
        self.checkpoints: list[pb.CheckpointReport] = []
        self.saved = threading.Event()
        self.num_signs = 0
        self.idle_s = 2.0
        # Facts that the trainer has read of its model.
        self.loaded_bytes = 0
        self.failures: list[pb.TrainerFailure] = []
        # Whether it has another batch for one that cannot be trained.
        self.sets_aside = True
        self.goodbye: pb.TrainerGoodbye | None = None

    def __enter__(self) -> FakeController:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait(LIMIT_S)

    def Register(
        self, request: pb.TrainerHello, context: grpc.ServicerContext
    ) -> pb.TrainerWelcome:
        if self.refusals:
            self.on_refused()
            _refuse(context, self.refusals.pop(0))
        self.hellos.append(pb.TrainerHello.FromString(request.SerializeToString()))
        self.epoch = len(self.hellos)
        version = pb.TrainerWelcome(version=request.version).version
        version.incarnation += self.incarnation
        return pb.TrainerWelcome(
            run_id="run", version=version, trainer_epoch=self.epoch
        )

    @property
    def hello(self) -> pb.TrainerHello | None:
        return self.hellos[-1] if self.hellos else None

    def forget(self) -> None:
        """Forgets the trainer, like a controller that was started again; its streams end."""
        self.epoch = 0
        self._forgotten.set()
        self._forgotten = threading.Event()

    def _check(self, context: grpc.ServicerContext) -> None:
        epoch = dict(context.invocation_metadata()).get(TRAINER_EPOCH, "")
        if epoch == str(self.epoch) and self.epoch:
            return
        _refuse(context, Reason.NOT_REGISTERED)

    def KeepPlace(
        self, request: pb.PlaceRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PlaceKept]:
        gone = threading.Event()
        context.add_callback(gone.set)
        self._check(context)
        forgotten = self._forgotten
        self.places = self.places + 1
        yield pb.PlaceKept()
        while not gone.wait(0.01):
            if forgotten.is_set() and self.ends_in_order:
                return
            if forgotten.is_set():
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    def Next(
        self, request: pb.NextRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.Directive]:
        self.requests.append(request)
        order = next(self._orders, None)
        if order is None:
            self.asked.set()
            # A real controller without anything to do is quiet until the limit of the call, too.
            gone = threading.Event()
            context.add_callback(gone.set)
            gone.wait(self.idle_s)
            order = [pb.Directive(wait=pb.WaitOrder())]
        for directive in order:
            if directive is None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            yield directive

    def ReportStep(
        self, request: pb.StepReport, context: grpc.ServicerContext
    ) -> pb.StepReceipt:
        self._check(context)
        self.steps.append(request)
        return pb.StepReceipt(version=request.version)

    def StartPublish(
        self, request: pb.PublishStart, context: grpc.ServicerContext
    ) -> pb.PublishStarted:
        if request.is_question:
            return pb.PublishStarted(receivers=self.still_there())
        self.starts.append(request)
        receivers = self._on_start_publish(request) if self._on_start_publish else []
        self._taking_part = receivers
        return pb.PublishStarted(receivers=receivers)

    def FinishPublish(
        self, request: pb.PublishResult, context: grpc.ServicerContext
    ) -> pb.PublishReceipt:
        self.results.append(request)
        return pb.PublishReceipt(discard_communicator=bool(request.error))

    def ReportCheckpoint(
        self, request: pb.CheckpointReport, context: grpc.ServicerContext
    ) -> pb.CheckpointReceipt:
        self.checkpoints.append(request)
        self.saved.set()
        return pb.CheckpointReceipt()

    def ReportStored(
        self, request: pb.StoredReport, context: grpc.ServicerContext
    ) -> pb.StoredReceipt:
        self._on_stored(request)
        return pb.StoredReceipt()

    def ReportPass(
        self, request: pb.PassReport, context: grpc.ServicerContext
    ) -> pb.PassReceipt:
        return pb.PassReceipt()

    def ReportWork(
        self, request: pb.WorkReport, context: grpc.ServicerContext
    ) -> pb.WorkReceipt:
        self.num_signs += 1
        self.loaded_bytes = request.loaded_bytes
        return pb.WorkReceipt()

    def ReportFailure(
        self, request: pb.TrainerFailure, context: grpc.ServicerContext
    ) -> pb.TrainerFailureReceipt:
        self.failures.append(request)
        return pb.TrainerFailureReceipt(
            set_aside=self.sets_aside and request.HasField("data")
        )

    def Finish(
        self, request: pb.TrainerGoodbye, context: grpc.ServicerContext
    ) -> pb.TrainerGoodbyeReceipt:
        self.goodbye = request
        return pb.TrainerGoodbyeReceipt()


def _refuse(context: grpc.ServicerContext, reason: Reason) -> NoReturn:
    info = error_details_pb2.ErrorInfo(reason=reason.value, domain=DOMAIN)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = grpc.StatusCode.FAILED_PRECONDITION
    text = reason.value.lower()
    status = status_pb2.Status(code=code.value[0], message=text, details=[detail])
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(code, text)


def batch_order(batch: Batch, *, chunk_size: int = 5) -> list[pb.Directive]:
    header = pb.BatchHeader(
        step=batch.step,
        batch_id=batch.batch_id,
        num_groups=len(set(batch.group_ids)),
        num_trajectories=len(batch.trajectories),
    )
    messages = [trajectory_to_pb(t, with_experts=False) for t in batch.trajectories]
    experts = [
        experts_to_pb(trajectory.routed_experts, place)
        for place, trajectory in enumerate(batch.trajectories)
        if trajectory.routed_experts is not None
    ]
    chunks = [
        pb.TrajectoryChunk(**{name: all_of_them[start : start + chunk_size]})
        for name, all_of_them in (("trajectories", messages), ("experts", experts))
        for start in range(0, len(all_of_them), chunk_size)
    ]
    return [
        pb.Directive(batch=header),
        *(pb.Directive(chunk=chunk) for chunk in chunks),
    ]


def publish_order(
    step: int, *, new_communicator: bool, verify: bool, begun: bool = False
) -> list[pb.Directive]:
    """The answer that orders version `step` to be sent to one server with one worker."""
    return [
        pb.Directive(
            publish=weights_pb2.PublishOrder(
                publish_id=f"publish-{step}",
                version=version_to_pb(PolicyVersion(0, step)),
                communicator=weights_pb2.Communicator(
                    communicator_id="members-1", transport="gloo"
                ),
                new_communicator=new_communicator,
                receivers=[
                    weights_pb2.Receiver(
                        server_id="server", first_rank=1, num_workers=1
                    )
                ],
                verify=verify,
                begun=begun,
                bucket_deadline_s=2.0,
                join_deadline_s=10.0,
            )
        )
    ]


def stop_order(
    reason: str = "all steps are done", *, without_model: bool = False
) -> list[pb.Directive]:
    return [pb.Directive(stop=pb.StopOrder(reason=reason, without_model=without_model))]


def make_batch(
    step: int, *, num_groups: int, group_size: int, vocab_size: int, max_tokens: int
) -> Batch:
    """Random trajectories, some of two turns, sampled by up to two versions; seeded by `step`."""
    random = np.random.default_rng(step)
    trajectories = tuple(
        make_trajectory(
            random,
            group=place // group_size,
            member=place % group_size,
            step=step,
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )
        for place in range(num_groups * group_size)
    )
    return Batch(step, f"batch-{step}", trajectories)


def with_branches(batch: Batch, *, vocab_size: int, max_tokens: int) -> Batch:
    """Gives two of three trajectories more branches, of which none is equal to another.

    They begin with what the first branch saw up to the end of its prompt or its first reply. Shares
    differ, and one is 0.
    """
    random = np.random.default_rng([batch.step, 1])

    def grown(trajectory: Trajectory) -> Trajectory:
        first = trajectory
        tokens = [trajectory.token_ids]
        runs = list(trajectory.run_lengths)
        spans = list(trajectory.version_spans)
        branches = [Branch(len(runs), float(random.choice([1.0, 0.5])))]
        logprobs = [trajectory.behavior_logprobs]
        for name in ("reviewer", "b")[: int(random.integers(1, 3))]:
            num_tokens = min(
                sum(first.run_lengths[: int(random.integers(1, 3))]), max_tokens - 3
            )
            sampled = int(random.integers(1, max_tokens - num_tokens - 1))
            new = random.integers(0, vocab_size, 1 + sampled).astype(np.uint32)
            tokens += [first.token_ids[:num_tokens], new]
            runs += [num_tokens + 1, sampled]
            spans.append(VersionSpan(sampled, PolicyVersion(0, batch.step)))
            branches.append(
                Branch(2, float(random.choice([1.0, 0.25, 0.0, -1.0])), name)
            )
            drawn = -np.log(vocab_size) + 0.3 * random.standard_normal(sampled)
            logprobs.append(drawn.astype(np.float32))
        return dataclasses.replace(
            first,
            token_ids=np.concatenate(tokens),
            run_lengths=tuple(runs),
            behavior_logprobs=np.concatenate(logprobs),
            version_spans=merge_spans(spans),
            branches=tuple(branches),
            num_turns=len(runs) // 2,
        )

    trajectories = tuple(
        trajectory if place % 3 == 2 else grown(trajectory)
        for place, trajectory in enumerate(batch.trajectories)
    )
    return dataclasses.replace(batch, trajectories=trajectories)


def make_trajectory(
    random: np.random.Generator,
    *,
    group: int,
    member: int,
    step: int,
    vocab_size: int,
    max_tokens: int,
) -> Trajectory:
    """One trajectory of 4 to `max_tokens` tokens."""
    total = int(random.integers(4, max_tokens + 1))
    prompt = int(random.integers(1, total - 1))
    sampled = total - prompt
    runs = (prompt, sampled)
    if sampled >= 3 and random.random() < 0.4:
        first = int(random.integers(1, sampled - 1))
        runs = (prompt, first, 1, sampled - first - 1)
    sampled = sum(runs[1::2])
    old = int(random.integers(0, sampled + 1)) if step else 0
    spans = (
        VersionSpan(old, PolicyVersion(0, max(0, step - 1))),
        VersionSpan(sampled - old, PolicyVersion(0, step)),
    )
    logprobs = -np.log(vocab_size) + 0.3 * random.standard_normal(sampled)
    return plain_trajectory(
        random.integers(0, vocab_size, total),
        runs,
        logprobs,
        group_id=GroupId(f"group-{step}-{group}"),
        member=member,
        task_index=group,
        version_spans=tuple(span for span in spans if span.length),
        reward=float(random.random() < 0.5),
        num_turns=len(runs) // 2,
    )
