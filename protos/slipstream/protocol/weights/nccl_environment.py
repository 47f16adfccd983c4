"""What NCCL is told, equal in every process that may become a member of one communicator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# Without cuMem, buffers of any allocator can be registered and vLLM's own communicators agree with
# ours; a member with and one without wait for each other for ever. NVLS needs a fabric manager and
# gains nothing for a broadcast.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# These decide how two members reach each other and in what pieces; NCCL does not compare them, and
# members that differ wait for each other for ever. Names of devices may differ.
AGREED = (
    *NCCL_ENVIRONMENT,
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET",
    "NCCL_IB_DISABLE",
)


def set_nccl_environment(environ: MutableMapping[str, str]) -> None:
    """Sets what the user has not set; before the first communicator of the process is made."""
    for name, value in NCCL_ENVIRONMENT.items():
        environ.setdefault(name, value)


def agreed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in which all members of a communicator must agree, as far as they are set."""
    return {name: environ[name] for name in AGREED if name in environ}
