"""vLLM 0.32's communicator needs nothing of NCCL 2.29.7 once this module is imported.

torch 2.11 brings NCCL 2.28.9. Where two functions are missing, vLLM switches its communicator off
without an error: it sends nothing, and receivers keep what was in their memory. Whatever else
switches off one of several ranks is an error here.
"""

# ruff: noqa: ANN401 - vLLM's arguments pass through.

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

# They give memory back while an engine sleeps; vLLM asks whether they are there before each call.
NEWER = ("ncclCommSuspend", "ncclCommResume")
NCCLLibrary.exported_functions = [
    each for each in NCCLLibrary.exported_functions if each.name not in NEWER
]
_init = PyNcclCommunicator.__init__


def _checked(self: PyNcclCommunicator, *args: Any, **named: Any) -> None:
    """Makes a communicator; RuntimeError if it is switched off and should send to others."""
    _init(self, *args, **named)
    if self.disabled and self.world_size > 1:
        raise RuntimeError("vLLM's communicator is switched off, and would send no weights")


PyNcclCommunicator.__init__ = _checked


class Extension:
    """Adds nothing to a worker of vLLM, which imports this module where its engine runs."""
