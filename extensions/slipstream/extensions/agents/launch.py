"""Checks the address of agents before a run starts."""

from slipstream.client.agent_front import tls_of
from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.scene import SERVER, Scene
from slipstream.core.errors import ConfigError


def check_front(scene: Scene) -> str | None:
    """Loads the certificate of the address by which agents from elsewhere call."""
    agents = scene.config.agents
    try:
        tls = tls_of(scene.config.security)
    except OSError as error:
        raise ConfigError(f"agents.listen: the TLS files cannot be loaded: {error}") from error
    shown = agents.url or agents.listen
    return f"agents from elsewhere call {shown}, {'without' if tls is None else 'by'} TLS"


CHECKS = (Check("agents", Stage.PLACE, SERVER, check_front),)
