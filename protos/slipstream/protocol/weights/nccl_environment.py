"""Settings of NCCL that must be equal in all members of a communicator."""

from collections.abc import Mapping, MutableMapping

# Without cuMem, NCCL can register buffers of any allocator, and vLLM's communicators have the same
# setting. A member with cuMem and one without wait for each other for ever. NVLS needs a fabric
# manager and does not speed up a broadcast.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# Variables that decide by which algorithm and in what pieces members talk. NCCL does not compare
# them, and members that differ wait for each other for ever. Settings for the devices of one host
# may differ.
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
    """Sets variables that the user left unset; call it before the process's first communicator."""
    for name, value in NCCL_ENVIRONMENT.items():
        environ.setdefault(name, value)


def agreed_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the set variables in which all members of a communicator must agree.

    Values are in lower case: NCCL does not distinguish Ring from ring.
    """
    return {name: environ[name].lower() for name in AGREED if environ.get(name)}
