"""Asks an engine which features of options it does without, and why.

Settings say so in this process, the scheduler in the engine's and workers in theirs.
"""

import logging

from slipstream.core.extension import active, resolve
from slipstream.core.settings.config import Config
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)

# The name of the call to the engine's process and to its workers (`WorkerExtension`).
CALL = "slipstream_disabled_features"


def let_engines_answer() -> None:
    """Makes `CALL` a method of engines that are forked later, which calls reach by its name."""
    setattr(EngineCore, CALL, _of_scheduler)


async def of_engine(llm: AsyncLLM, config: Config) -> dict[str, str]:
    """Returns why an engine does without features, by their names; logs a line for each."""
    on_cpu = current_platform.is_cpu()
    causes: dict[str, str] = {}
    for extension in active(config):
        if extension.disabled_features:
            causes |= resolve(extension.disabled_features)(config, on_cpu=on_cpu)
    causes |= await llm.engine_core.call_utility_async(CALL)
    for causes_of_worker in await llm.collective_rpc(CALL):
        causes |= causes_of_worker
    for feature, cause in sorted(causes.items()):
        logger.info("%s is off: %s", feature, cause)
    return causes


def _of_scheduler(core: EngineCore) -> dict[str, str]:
    return dict(core.scheduler.disabled_features)
