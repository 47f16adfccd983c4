"""Checks the servers of reference models before a run."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.preflight import accept, ask
from slipstream.client.launch.scene import SERVER, Scene
from slipstream.core.extension import program


async def check_reference(scene: Scene) -> None:
    """Checks, for seconds, that the servers can do all that the run needs."""
    module = program("check-reference").module
    reference = scene.config.reference
    settings = [] if reference is None else reference.servers
    late = f"{' or '.join(settings)} did not answer"
    accept(await ask(module, scene.config, late=late))


CHECKS = (Check("reference", Stage.START, SERVER, check_reference, after="setup"),)
