"""vLLM 0.32's communicator needs nothing of NCCL 2.29.7 once this module is imported.

torch 2.11 brings NCCL 2.28.9. Where two functions are missing, vLLM switches its communicator off
without an error: it sends nothing, and receivers keep what was in their memory.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

# They give memory back while an engine sleeps; vLLM asks whether they are there before each call.
NEWER = ("ncclCommSuspend", "ncclCommResume")
NCCLLibrary.exported_functions = [
    each for each in NCCLLibrary.exported_functions if each.name not in NEWER
]


class Extension:
    """Adds nothing to a worker of vLLM, which imports this module where its engine runs."""
