"""Main memory that a rollout server uses, and the share of GPU memory for vLLM."""

import contextlib
import math
import time

import psutil
from slipstream.core.models.model_files import loaded_tensors
from slipstream.core.settings.config import Config

# Seconds between two scans of all processes: a scan takes too long for every heartbeat.
_LOOK_S = 5.0


class ProcessMemory:
    """Measures the resident memory of this process and its descendants.

    Shared pages count in each process that shares them.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked_s = -_LOOK_S
        self._bytes = 0

    def resident_bytes(self) -> int:
        """Returns the resident bytes at the last scan; scans again if that is more than 5 s ago."""
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._bytes = 0
            for process in (self._process, *self._process.children(recursive=True)):
                # A process may end after it was listed.
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._bytes += int(process.memory_info().rss)
        return self._bytes


# Greatest part of the engine's share that is taken from the KV cache for arriving weights.
MOST_OF_SHARE = 1 / 6


def vllm_share(config: Config, wire_bytes: int, gpu_bytes: int) -> float:
    """Returns the fraction of a GPU's memory for vLLM: the engine's share minus a staged update.

    `wire_bytes` is the size of an update, all of which each worker of an engine receives;
    `gpu_bytes` is the GPU's memory. Nothing is subtracted if updates are not staged, or if the
    update is too large.
    """
    share, part = config.rollout_server.gpu_memory_utilization, wire_bytes / gpu_bytes
    return share - part if config.may_stage and part <= MOST_OF_SHARE * share else share


def wire_bytes(config: Config) -> int:
    """Returns the size of all weights as they are sent, from the shapes in the model's files."""
    elements = sum(math.prod(shape) for _, shape in loaded_tensors(config))
    return (4 if config.model.dtype == "float32" else 2) * elements
