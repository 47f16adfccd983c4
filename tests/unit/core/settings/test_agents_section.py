"""Settings of the address by which agents beyond their host reach the model."""

import pytest
from slipstream.core.errors import ConfigError
from support.fakes.small_configs import small_config

OPEN = "10.0.0.1:8443"
EVERY = "[::]:8443"
CERTIFICATE = {"tls_certificate": "a.pem", "tls_key": "a.key"}


@pytest.mark.parametrize(
    ("agents", "cause"),
    [
        ({"url": "https://host"}, "agents.url needs agents.listen"),
        ({"listen": "127.0.0.1:0"}, "agents.listen must have a port that is not 0"),
        ({"listen": "127.0.0.1"}, "an address is host:port"),
        ({"listen": EVERY}, "agents.url must say by which one agents reach it"),
        ({"listen": OPEN, "url": "host:8443"}, "agents.url must begin with http"),
        ({"listen": OPEN, "url": "ftp://host"}, "agents.url must begin with http"),
        ({"listen": OPEN, "url": "https://"}, "agents.url must begin with http"),
        ({"listen": OPEN, "url": "https://host/?a=1"}, "agents.url must have no query"),
        ({"listen": OPEN, "url": "https://me@host"}, "agents.url must have no query"),
    ],
)
def test_addresses_that_cannot_work_are_refused(
    agents: dict[str, str], cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause):
        small_config(agents=agents, security=CERTIFICATE)


def test_an_address_beyond_loopback_needs_a_certificate() -> None:
    agents = {"listen": OPEN, "url": "https://{host}:8443/agents"}
    with pytest.raises(
        ConfigError, match="agents.listen 10.0.0.1:8443 is not loopback: set"
    ):
        small_config(agents=agents)
    assert small_config(agents=agents, security=CERTIFICATE).agents.listen == OPEN


def test_a_tunnel_may_end_at_loopback_without_a_certificate() -> None:
    agents = {"listen": "127.0.0.1:8443", "url": "https://tunnel.example"}
    assert small_config(agents=agents).agents.url == "https://tunnel.example"
