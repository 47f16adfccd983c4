"""Proves the user's own algorithm functions before a run."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.preflight import prove
from slipstream.client.launch.scene import LEARNER, Scene
from slipstream.core.errors import ConfigError


async def check_proofs(scene: Scene) -> str | None:
    """Proves the user's own algorithm functions."""
    names = sorted(set(scene.config.algorithm.own_functions.values()))
    if not names:
        return None
    proved = await prove(scene.config)
    for fault in proved.faults:
        raise ConfigError(fault)
    return f"own functions are proved: {', '.join(names)}"


CHECKS = (Check("proofs", Stage.START, LEARNER, check_proofs, after="setup"),)
