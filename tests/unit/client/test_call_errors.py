"""What a user reads when a call of the controller ends with a status."""

import grpc
import pytest
from slipstream.client.client import CallErrors, NoController
from slipstream.core.errors import ConfigError, SlipstreamError

ADDRESS = "10.0.0.1:7070"
NO_ANSWER = "no controller answers at {}; start a run, or give the address of its controller, "
NO_TLS = "handshake failed: WRONG_VERSION_NUMBER"


@pytest.mark.parametrize(
    ("code", "details", "wants_tls", "kind", "message"),
    [
        ("UNAVAILABLE", "Connection refused", False, NoController, NO_ANSWER),
        ("UNAVAILABLE", "Socket closed", True, NoController, NO_ANSWER),
        ("UNAVAILABLE", "Socket closed", False, ConfigError, "{} hung up: does it want TLS (tls_c"),
        (
            "UNAVAILABLE",
            f"Ssl {NO_TLS}",
            True,
            ConfigError,
            "{} does not speak TLS as expected: Ssl",
        ),
        ("UNIMPLEMENTED", "x", False, ConfigError, "what answers at {} is no controller of this"),
        ("UNAUTHENTICATED", "the token is wrong", False, ConfigError, "the token is wrong"),
        ("DEADLINE_EXCEEDED", "", False, SlipstreamError, "the controller at {} gave no answer in"),
        ("INTERNAL", "a fault", False, SlipstreamError, "the controller at {} failed: a fault"),
        ("INTERNAL", "", False, SlipstreamError, "the controller at {} failed: INTERNAL"),
    ],
)
def test_a_status_becomes_an_error_that_says_what_to_do(code, details, wants_tls, kind, message):
    errors = CallErrors(ADDRESS, wants_tls=wants_tls)
    found = errors.of_status(grpc.StatusCode[code], details)
    assert type(found) is kind
    assert str(found).startswith(message.format(ADDRESS))
