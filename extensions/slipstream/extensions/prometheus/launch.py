"""Checks before a run that the processes which start here can serve their metrics."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.placement import QUEUE_ENDS
from slipstream.client.launch.scene import CONTROLLER, SERVER, Scene
from slipstream.extensions.prometheus.endpoint import address_of, listen_for


def check_metrics_ports(scene: Scene) -> None:
    """Checks that the ports of `tracking.prometheus` are free."""
    for role in QUEUE_ENDS:
        if role in scene.parts:
            listen_for(role, address_of(role, scene.config)).close()


CHECKS = (
    Check(
        "metrics",
        Stage.PLACE,
        CONTROLLER | SERVER,
        check_metrics_ports,
        "choose another port",
        after="controller",
    ),
)
