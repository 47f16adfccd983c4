"""Errors on the wire as google.rpc.Status: code, text, and a machine-readable reason.

The reason is a google.rpc.ErrorInfo in the trailing metadata, as in gRPC's richer error model.
"""

import asyncio
from enum import Enum
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "slipstream"
DETAILS_KEY = "grpc-status-details-bin"
# Status codes with which a controller refuses a call: another attempt would not help.
REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Reason(Enum):
    """The reason why a call was refused."""

    # An argument cannot work; the text has the value and the rule.
    BAD_ARGUMENT = "BAD_ARGUMENT"
    # The request does not fit the state of the run.
    WRONG_STATE = "WRONG_STATE"
    # The peer uses another version, or breaks the protocol.
    PROTOCOL = "PROTOCOL"
    # The peer is too small for the run.
    TOO_SMALL = "TOO_SMALL"
    # The controller was started again and does not know the trainer, which must register again.
    NOT_REGISTERED = "NOT_REGISTERED"
    # A different trainer, or a server of the same name, has the place until it ends.
    PLACE_TAKEN = "PLACE_TAKEN"
    # The trainer's weights are older than the batches that the run keeps: it must load the newest
    # checkpoint before it registers.
    OUTDATED = "OUTDATED"
    # The token is missing or wrong.
    WRONG_TOKEN = "WRONG_TOKEN"
    # The token belongs to a role that must not call the method.
    NOT_OF_THE_ROLE = "NOT_OF_THE_ROLE"
    # The call names no run, or another run than the controller's.
    OTHER_RUN = "OTHER_RUN"
    # The client has more calls open than are allowed.
    TOO_MANY_CALLS = "TOO_MANY_CALLS"


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    code: grpc.StatusCode,
    text: str,
    reason: Reason,
) -> NoReturn:
    """Aborts the call with `code`, `text` (one line), and an ErrorInfo of `reason`.

    Raises AbortError, or CancelledError if the caller has disconnected.
    """
    info = error_details_pb2.ErrorInfo(reason=reason.value, domain=DOMAIN)
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=text, details=[detail])
    try:
        await context.abort(code, text, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the caller has gone") from error
    raise AssertionError("abort does not return")


def broken_stream(details: str) -> grpc.aio.AioRpcError:
    """Returns the error of a stream that leads nowhere, as of one whose connection was lost."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details, details)


def has_reason(error: grpc.RpcError, reason: Reason) -> bool:
    """Whether a call failed for the `reason` that `abort` was given."""
    # The error of a call is also a grpc.Call, which the stubs do not declare.
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            continue
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return bool(info.reason == reason.value)
    return False
