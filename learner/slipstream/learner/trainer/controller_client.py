"""The trainer's blocking calls to the controller."""

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
from slipstream.core.backoff import Backoff
from slipstream.core.errors import RunFailed
from slipstream.core.patience import Patience
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.ranks.activity import Activity
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import call_metadata, cause_of, open_blocking_channel
from slipstream.protocol.codec import TRAINER_EPOCH, version_from_pb, version_to_pb
from slipstream.protocol.rich_errors import Reason, has_reason
from slipstream.v1 import trainer_pb2 as pb
from slipstream.v1 import trainer_pb2_grpc

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
# Generated code is untyped.
Stub: TypeAlias = Any

CALL_TIMEOUT_S = 30.0
FAILURE_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.5
# Longest pause between two attempts to register while another trainer has the place.
PLACE_PAUSE_S = 5.0
# The reason of a stop order that comes from SIGTERM: the run may go on with another trainer.
TERMINATED = "the trainer was told to terminate"


# Statuses of a call that found no controller, or one that stands still.
SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class ControllerLost(Exception):  # noqa: N818
    """Raised if no controller answers; ranks that start again may find one."""


class Outdated(RuntimeError):  # noqa: N818
    """Raised if the trainer must load the newest checkpoint before it can register."""


class ControllerClient:
    """Makes the calls of one trainer rank; close it after use.

    Unless its docstring says otherwise, a method that calls the controller repeats the call for
    `controller.stall_timeout_s` while no controller answers, then raises ControllerLost. Seconds in
    which this process stood still do not count. The method raises RunFailed if the controller
    rejects the call, and RuntimeError if a restarted controller has another version than the
    trainer.
    """

    def __init__(self, config: Config) -> None:
        credentials = run_credentials(config)
        # The hello of the registration, with the newest version; None before it.
        self._hello: pb.TrainerHello | None = None
        # Why the trainer could not register again with a restarted controller.
        self._fault: Exception | None = None
        # Held while the trainer registers again: other calls must not send the old epoch meanwhile.
        self._entering = threading.RLock()
        self._address = config.controller.address
        self._channel = open_blocking_channel(self._address, credentials)
        self._stub: Stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)
        self._token = call_metadata(credentials, config.run.id)
        # The epoch of the newest registration.
        self._epoch: tuple[tuple[str, str], ...] = ()
        # Half of the other ranks' limit, so that they outlast a call that rank 0 abandons.
        self._long_timeout_s = config.learner.timeout_s / 2
        self._stall_timeout_s = config.controller.stall_timeout_s
        # The patience of the calls of `next` that have had no answer; None after an answer.
        self._patience: Patience | None = None
        self._stop_reason: str | None = None
        self._next_call: Stub | None = None
        # Whether a batch arrives by this call.
        self._has_batch = False
        self._closed = threading.Event()

    def register(self, hello: pb.TrainerHello) -> pb.TrainerWelcome:
        """Registers the trainer, and keeps its place in the run until `close`.

        While another trainer has the place, waits for at most half of `learner.timeout_s`. After a
        restart of the controller, a thread registers again with the newest version. Raises Outdated
        if batches were removed that the trainer of this version would need.
        """
        welcome = self._enter(hello)
        self._hello = hello
        hello.version.CopyFrom(welcome.version)
        keeper = threading.Thread(
            target=self._keep_place,
            name="keeps-place",
            daemon=True,
        )
        keeper.start()
        return welcome

    def _enter(self, hello: pb.TrainerHello) -> pb.TrainerWelcome:
        """Registers once the place is free; later calls carry the epoch of this registration."""
        patience = Patience(self._long_timeout_s)
        backoff = Backoff(RETRY_PAUSE_S, PLACE_PAUSE_S)
        call = functools.partial(self._stub.Register, metadata=self._token)
        while True:
            patience.begin(PLACE_PAUSE_S)
            try:
                welcome: pb.TrainerWelcome = self._retried("Register", call, hello, CALL_TIMEOUT_S)
                break
            except grpc.RpcError as error:
                if has_reason(error, Reason.OUTDATED):
                    raise Outdated(_describe(error)) from error
                is_over = self._stop_reason is not None or patience.is_over
                if is_over or not has_reason(error, Reason.PLACE_TAKEN):
                    raise self._failure("Register", error) from error
                logger.warning("waiting for the place in the run: %s", _describe(error))
            time.sleep(backoff.take_s())
        self._epoch = ((TRAINER_EPOCH, str(welcome.trainer_epoch)),)
        return welcome

    @property
    def epoch(self) -> str:
        """The epoch of the newest registration, or "" before the first one."""
        return self._epoch[0][1] if self._epoch else ""

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._token, *self._epoch)

    def _keep_place(self) -> None:
        """Holds the `KeepPlace` stream open until `close`, to show that the trainer runs."""
        while not self._closed.is_set():
            try:
                for _ in self._stub.KeepPlace(pb.PlaceRequest(), metadata=self._metadata):
                    pass
            except grpc.RpcError as error:
                if self._closed.is_set():
                    return
                logger.warning("KeepPlace: %s", _describe(error))
                if has_reason(error, Reason.NOT_REGISTERED):
                    self._enter_again()
                elif _code(error) is grpc.StatusCode.FAILED_PRECONDITION:
                    # The next call fails with the same cause.
                    return
            except ValueError:
                # gRPC's error for a channel that `close` has closed meanwhile.
                if self._closed.is_set():
                    return
                raise
            self._closed.wait(RETRY_PAUSE_S)

    def _enter_again(self) -> None:
        """Registers with a restarted controller; an error is kept for the next call to raise."""
        assert self._hello is not None
        version = version_from_pb(self._hello.version)
        with self._entering:
            try:
                registered = version_from_pb(self._enter(self._hello).version)
            except (RunFailed, ControllerLost, Outdated) as error:
                self._fault = error
                return
            if registered != version:
                # Not a RunFailed: the ranks go on from their newest checkpoint.
                text = f"the run calls the trainer's version {version} {registered} now"
                self._fault = RuntimeError(text)

    def next(
        self,
        version: PolicyVersion,
        *,
        communicator_id: str,
        bucket_digests: Sequence[bytes],
        held_passes: Sequence[bytes] = (),
        can_store: bool = False,
    ) -> Iterator[pb.Directive]:
        """Waits for the controller's next order, and yields the messages of the answer.

        After `stop`, even during the wait, it is a stop order; a batch that has begun to arrive
        comes first. It is an order to ask again before other ranks lose their patience, even if no
        controller answers. `version` and `bucket_digests` describe the trainer's weights,
        `held_passes` its gradients. `communicator_id` is the senders' open communicator ("" if
        there is none). `can_store` says that a version can be stored now. A batch whose connection
        breaks is asked for again, and goes on behind its last message. Raises RuntimeError if it
        has changed.
        """
        request = pb.NextRequest(
            version=version_to_pb(version),
            communicator_id=communicator_id,
            bucket_digests=bucket_digests,
            held_passes=held_passes,
            can_store=can_store,
        )
        self._patience = self._patience or Patience(self._stall_timeout_s)
        try:
            first, stream = self._open_answer(request)
        except grpc.RpcError as error:
            if self._stop_reason is not None:
                stop = pb.StopOrder(reason=self._stop_reason, without_model=True)
                yield pb.Directive(stop=stop)
                return
            if _is_silence(error) and not self._patience.is_over:
                yield pb.Directive(wait=pb.WaitOrder())
                return
            raise self._failure("Next", error) from error
        if first is None:
            return
        yield first
        # Only a batch has further messages; for other orders servers may already wait.
        if first.WhichOneof("directive") == "batch":
            yield from self._rest_of_batch(request, first, stream)

    def _open_answer(
        self, request: pb.NextRequest, *, in_batch: bool = False
    ) -> tuple[pb.Directive | None, Iterator[pb.Directive]]:
        """Returns the first message of an answer, None for an empty one, and the others."""

        def begin(
            request: pb.NextRequest, *, timeout: float
        ) -> tuple[pb.Directive | None, Iterator[pb.Directive]]:
            # gRPC keeps a call that nobody reads to its end for as long as the channel is open.
            with contextlib.suppress(grpc.RpcError):
                list(self._next_call or ())
            stream = self._stub.Next(request, timeout=timeout, metadata=self._metadata)
            # Kept until the next call, because gRPC cancels an unfinished call without a reference.
            self._next_call = stream
            self._has_batch = False
            if self._stop_reason is not None and not in_batch:
                stream.cancel()
            messages = iter(stream)
            first = next(messages, None)
            self._has_batch = first is not None and first.WhichOneof("directive") == "batch"
            return first, messages

        patience = self._patience or Patience(self._stall_timeout_s)
        answer = self._retried("Next", begin, request, self._long_timeout_s, lasting=patience)
        self._patience = None
        return answer

    def _rest_of_batch(
        self, request: pb.NextRequest, header: pb.Directive, stream: Iterator[pb.Directive]
    ) -> Iterator[pb.Directive]:
        """Yields what follows the header, for which other ranks wait with each message."""
        num_yielded = 0
        until_s = math.inf
        while True:
            try:
                for message in itertools.islice(stream, num_yielded, None):
                    num_yielded += 1
                    until_s = math.inf
                    yield message
                return
            except grpc.RpcError as error:
                # Without a new message the other ranks have no patience for a second limit.
                until_s = min(until_s, time.monotonic() + self._long_timeout_s)
                if not self._is_away(error) or time.monotonic() > until_s:
                    raise self._failure("Next", error) from error
                logger.warning("a batch broke off: %s; asking again", _describe(error))
            try:
                first, stream = self._open_answer(request, in_batch=True)
            except grpc.RpcError as error:
                raise self._failure("Next", error) from error
            if first != header:
                raise RuntimeError(
                    f"batch {header.batch.batch_id} broke off, and the controller gives another "
                    "order in its place"
                )

    def stop(self, reason: str) -> None:
        """Makes `next` return a stop order; may be called from a signal handler."""
        self._stop_reason = reason
        # All ranks read a batch that has begun to arrive.
        if self._next_call is not None and not self._has_batch:
            self._next_call.cancel()

    def report_step(self, report: pb.StepReport) -> PolicyVersion:
        """Reports a step; returns the version that the controller gives to the new weights."""
        receipt: pb.StepReceipt = self._call("ReportStep", report)
        if self._hello is not None:
            self._hello.version.CopyFrom(receipt.version)
            self._hello.weight_digest = report.weight_digest
        return version_from_pb(receipt.version)

    def report_pass(self, report: pb.PassReport) -> None:
        """Reports the result of a pass."""
        self._call("ReportPass", report)

    def start_publish(self, start: pb.PublishStart, *, join_deadline_s: float) -> pb.PublishStarted:
        """Announces a publish; returns once receivers (none if it is abandoned) are to join."""
        timeout = join_deadline_s + CALL_TIMEOUT_S
        started: pb.PublishStarted = self._call("StartPublish", start, timeout)
        return started

    def has_all_receivers(self, publish_id: str, count: int) -> bool:
        """Whether `count` receivers still take part in a publish; may be called on any thread.

        Also returns True if the controller does not answer: other calls, with longer limits, detect
        that. Returns False after a restart of the controller, which abandons the publish.
        """
        question = pb.PublishStart(publish_id=publish_id, is_question=True)
        try:
            answer = self._stub.StartPublish(
                question, timeout=QUESTION_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            logger.warning("StartPublish: %s", _describe(error))
            return not has_reason(error, Reason.NOT_REGISTERED)
        return len(answer.receivers) >= count

    def finish_publish(self, result: pb.PublishResult) -> pb.PublishReceipt:
        """Reports digests and probe; returns once every receiver has loaded, failed or is late."""
        receipt: pb.PublishReceipt = self._call("FinishPublish", result, self._long_timeout_s)
        return receipt

    def report_checkpoint(self, report: pb.CheckpointReport) -> None:
        """Reports that a checkpoint is complete."""
        self._call("ReportCheckpoint", report)

    def report_stored(self, report: pb.StoredReport) -> pb.StoredReceipt:
        """Reports the result of a store order; may be called on any thread."""
        receipt: pb.StoredReceipt = self._call("ReportStored", report)
        return receipt

    def report_work(self, activity: Activity) -> None:
        """Reports that the trainer makes progress; ignores a failed call; works on any thread."""
        report = pb.WorkReport(loaded_bytes=activity.loaded_bytes)
        with contextlib.suppress(grpc.RpcError):
            self._stub.ReportWork(report, timeout=QUESTION_TIMEOUT_S, metadata=self._metadata)

    def report_failure(self, failure: pb.TrainerFailure) -> None:
        """Reports why a rank fails; if the controller is unreachable, only logs that."""
        try:
            self._stub.ReportFailure(failure, timeout=FAILURE_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            logger.warning("the failure could not be reported: %s", _describe(error))

    def set_batch_aside(self, failure: pb.TrainerFailure) -> bool:
        """Reports an untrainable batch, `failure.data`; returns whether it was set aside."""
        receipt: pb.TrainerFailureReceipt = self._call("ReportFailure", failure)
        return receipt.set_aside

    def finish(self, goodbye: pb.TrainerGoodbye) -> None:
        """Reports that the trainer leaves on purpose."""
        self._call("Finish", goodbye)

    def close(self) -> None:
        """Closes the connection, which frees the trainer's place."""
        self._closed.set()
        self._channel.close()

    def _call(self, name: str, request: object, timeout: float = CALL_TIMEOUT_S) -> Any:  # noqa: ANN401
        def call(request: object, *, timeout: float) -> object:
            return getattr(self._stub, name)(request, timeout=timeout, metadata=self._metadata)

        try:
            return self._retried(name, call, request, timeout)
        except grpc.RpcError as error:
            raise self._failure(name, error) from error

    def _retried(
        self,
        name: str,
        call: Callable[..., Answer],
        request: object,
        timeout: float,
        *,
        lasting: Patience | None = None,
    ) -> Answer:
        """Returns the answer of `call`, which is repeated while no controller answers.

        The patience is that of one call or, if `lasting` is given, that of several calls, of which
        this one takes at most half of the other ranks' limit.
        """
        patience = lasting or Patience(self._stall_timeout_s)
        until_s = math.inf if lasting is None else time.monotonic() + self._long_timeout_s
        while True:
            patience.begin(timeout + RETRY_PAUSE_S)
            with self._entering:
                epoch = self._epoch
                if self._fault is not None:
                    raise self._fault
            try:
                return call(request, timeout=timeout)
            except grpc.RpcError as error:
                with self._entering:
                    has_entered = self._epoch is not epoch
                if self._fault is not None:
                    raise self._fault from error
                if has_entered:
                    continue
                is_over = patience.is_over or time.monotonic() > until_s
                if not self._is_away(error) or self._stop_reason is not None or is_over:
                    raise
                logger.warning("%s: %s; trying again", name, _describe(error))
            time.sleep(RETRY_PAUSE_S)

    def _is_away(self, error: grpc.RpcError) -> bool:
        # `_keep_place` registers with a controller that was started again.
        is_unknown = self._hello is not None and has_reason(error, Reason.NOT_REGISTERED)
        return is_unknown or _is_silence(error)

    def _failure(self, name: str, error: grpc.RpcError) -> RunFailed | ControllerLost:
        kind = ControllerLost if _is_silence(error) else RunFailed
        return kind(f"the controller at {self._address} failed {name}: {_describe(error)}")


def _is_silence(error: Stub) -> bool:
    return _code(error) in SILENCE


def _code(error: Stub) -> grpc.StatusCode:
    # The error of a call is also a grpc.Call, which the stubs do not declare.
    return grpc.StatusCode(error.code())


def _describe(error: Stub) -> str:
    return f"{_code(error).name}: {cause_of(_code(error), error.details())}"
