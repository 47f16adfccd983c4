"""What NCCL is told, equal in every process that may become a member of one communicator."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

# Without cuMem, buffers of any allocator can be registered and vLLM's own communicators agree with
# ours; a member with and one without wait for each other for ever. NVLS needs a fabric manager and
# gains nothing for a broadcast.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# These decide in what pieces and by which way members talk; NCCL does not compare them, and members
# that differ wait for each other for ever. What concerns the devices of one host may differ.
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
)


def set_nccl_environment(environ: MutableMapping[str, str]) -> None:
    """Sets what the user has not set; before the first communicator of the process is made."""
    for name, value in NCCL_ENVIRONMENT.items():
        environ.setdefault(name, value)


def agreed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings in which all members of a communicator must agree, as far as they are set.

    In lower case: NCCL does not tell Ring from ring.
    """
    return {name: environ[name].lower() for name in AGREED if environ.get(name)}
