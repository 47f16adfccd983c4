"""Checks the functions that weigh tasks before a run."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.preflight import accept, ask
from slipstream.client.launch.scene import CONTROLLER, Scene
from slipstream.core.errors import FACT
from slipstream.core.extension import program


async def check_task_weights(scene: Scene) -> str:
    """Calls each function with results as a run has them."""
    module = program("check-task-weights").module
    checked = await ask(module, scene.config, late="functions that weigh tasks did not answer")
    accept(checked)
    facts = [line.removeprefix(FACT) for line in checked.output.splitlines()]
    return "; ".join(facts)


CHECKS = (
    Check(
        "task weights",
        Stage.SETTINGS,
        CONTROLLER,
        check_task_weights,
        starts_program=True,
        after="algorithm",
    ),
)
