"""The settings without which agents from elsewhere are not let in."""

from collections.abc import Iterator

from slipstream.core.machine.address import address_parts, is_loopback
from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line if the address of agents is open to others without TLS."""
    listen = config.agents.listen
    if listen is None or config.security.tls_certificate is not None:
        return
    if not is_loopback(address_parts(listen)[0]):
        yield (
            f"agents.listen {listen} is not loopback: set security.tls_certificate and tls_key, "
            "or let a tunnel end at an address of loopback"
        )
