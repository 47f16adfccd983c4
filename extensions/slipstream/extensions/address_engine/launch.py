"""Checks the server at the address before a run starts."""

import asyncio

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.scene import SERVER, Scene
from slipstream.extensions.address_engine.address import check_server


async def check_address(scene: Scene) -> str:
    """Asks the server at the address, for seconds, whether it can do what the run needs."""
    served = await asyncio.to_thread(check_server, scene.config)
    return f"vLLM {served.version} at {served.url} samples, with {served.max_model_len} tokens"


CHECKS = (Check("engine", Stage.START, SERVER, check_address, after="setup"),)
