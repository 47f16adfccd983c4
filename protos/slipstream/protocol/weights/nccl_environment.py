"""What NCCL is told, equal in every process that may become a member of one communicator."""

from __future__ import annotations

from collections.abc import MutableMapping

# Without cuMem, buffers of any allocator can be registered and vLLM's own communicators agree with
# ours; a member with and one without wait for each other for ever. NVLS needs a fabric manager and
# gains nothing for a broadcast.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def set_nccl_environment(environ: MutableMapping[str, str]) -> None:
    """Sets what the user has not set; before the first communicator of the process is made."""
    for name, value in NCCL_ENVIRONMENT.items():
        environ.setdefault(name, value)
