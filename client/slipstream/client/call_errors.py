"""Errors of the client for the statuses with which calls of the controller end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio
from slipstream.core.errors import ConfigError, SlipstreamError

LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
)


class NoController(ConfigError):
    """Nothing listens at the address."""


class CallErrors:
    """Turns statuses of gRPC into errors that name the controller's address and what to do."""

    def __init__(self, address: str, *, wants_tls: bool) -> None:
        self._address, self._wants_tls = address, wants_tls
        self.no_answer = f"no controller answers at {address}"

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raises the error for a status with which a call inside ends."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.of_status(error.code(), error.details() or "") from None

    def of_status(self, code: grpc.StatusCode, details: str) -> SlipstreamError:
        """Returns the error for a status."""
        if code is grpc.StatusCode.UNAVAILABLE:
            if "handshake" in details.lower():
                return ConfigError(f"{self._address} does not speak TLS as expected: {details}")
            if "Socket closed" in details and not self._wants_tls:
                return ConfigError(f"{self._address} hung up: does it want TLS (tls_ca)?")
            what_to_do = "start a run, or give the address of its controller, HOST:PORT"
            return NoController(f"{self.no_answer}; {what_to_do}")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"what answers at {self._address} is no controller of this version")
        if code in REFUSED:
            return ConfigError(details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return SlipstreamError(f"the controller at {self._address} gave no answer in time")
        return SlipstreamError(f"the controller at {self._address} failed: {details or code.name}")
