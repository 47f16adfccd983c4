"""What a user reads when a call of the controller ends with a status."""

import grpc
import pytest
from slipstream.client.client import CallErrors, NoController
from slipstream.core.errors import ConfigError, SlipstreamError

ADDRESS = "10.0.0.1:7070"
NO_ANSWER = (
    f"no controller answers at {ADDRESS}; start a run, or give the address of its controller, "
    "HOST:PORT"
)


@pytest.mark.parametrize(
    ("code", "details", "wants_tls", "kind", "message"),
    [
        ("UNAVAILABLE", "Connection refused", False, NoController, NO_ANSWER),
        ("UNAVAILABLE", "Socket closed", True, NoController, NO_ANSWER),
        (
            "UNAVAILABLE",
            "Socket closed",
            False,
            ConfigError,
            f"{ADDRESS} hung up: does it want TLS (tls_ca)?",
        ),
        (
            "UNAVAILABLE",
            "Ssl handshake failed: WRONG_VERSION_NUMBER",
            True,
            ConfigError,
            f"{ADDRESS} does not speak TLS as expected: Ssl handshake failed: WRONG_VERSION_NUMBER",
        ),
        (
            "UNIMPLEMENTED",
            "Method not found!",
            False,
            ConfigError,
            f"what answers at {ADDRESS} is no controller of this version",
        ),
        ("UNAUTHENTICATED", "the token is wrong", False, ConfigError, "the token is wrong"),
        (
            "DEADLINE_EXCEEDED",
            "",
            False,
            SlipstreamError,
            f"the controller at {ADDRESS} gave no answer in time",
        ),
        (
            "INTERNAL",
            "a fault",
            False,
            SlipstreamError,
            f"the controller at {ADDRESS} failed: a fault",
        ),
        ("INTERNAL", "", False, SlipstreamError, f"the controller at {ADDRESS} failed: INTERNAL"),
    ],
)
def test_a_status_becomes_an_error_that_says_what_to_do(code, details, wants_tls, kind, message):
    errors = CallErrors(ADDRESS, wants_tls=wants_tls)
    found = errors.of_status(grpc.StatusCode[code], details)
    assert (type(found), str(found)) == (kind, message)
