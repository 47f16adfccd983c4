"""Chooses the transport of weights by the devices of the trainer and the rollout servers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import ParallelSection
from slipstream.v1.weights_pb2 import Place


def choose_transport(
    setting: str,
    learner: Iterable[Place],
    servers: Mapping[str, Place],
    *,
    parallel: ParallelSection,
) -> str:
    """Returns the transport between the trainer and these servers: gloo, nccl or ipc.

    `setting` is a transport, or "auto". Raises ConfigError if the transport cannot connect the
    processes. "nccl" cannot connect two processes on one GPU, or processes with different NCCL
    settings. "ipc" works within one host and between processes on the same kind of device. It sends
    from one trainer rank, so pipeline and expert parallel sizes must be 1.
    """
    places = {**{f"trainer rank {rank}": place for rank, place in enumerate(learner)}, **servers}
    on_cpu = [name for name, place in places.items() if not place.gpus]
    users = Counter(gpu for place in places.values() for gpu in place.gpus)
    shared = [gpu for gpu, number in users.items() if number > 1]
    if setting == "auto":
        if on_cpu:
            return "gloo"
        setting = "ipc" if shared else "nccl"
    if setting not in ("nccl", "ipc"):
        # Neither gloo nor a transport of an extension asks where processes compute.
        return setting
    if setting == "nccl":
        _check_nccl(places, on_cpu, shared)
    else:
        _check_ipc(places, on_cpu, parallel)
    return setting


def _check_nccl(places: Mapping[str, Place], on_cpu: Sequence[str], shared: Sequence[str]) -> None:
    """Raises ConfigError for places that one NCCL communicator cannot join."""
    if on_cpu:
        raise ConfigError(
            f"weights.transport nccl joins GPUs only, but {on_cpu[0]} computes on the CPU: set gloo"
        )
    if shared:
        both = [name for name, place in places.items() if shared[0] in place.gpus]
        raise ConfigError(
            f"weights.transport nccl joins no two processes on one GPU, but {' and '.join(both)} "
            f"share {shared[0]}: set ipc or auto, or give each its own"
        )
    first, *further = places
    for name in further:
        ours = places[first].nccl
        theirs = places[name].nccl
        for variable in sorted({*ours, *theirs}):
            if ours.get(variable) != theirs.get(variable):
                raise ConfigError(
                    f"weights.transport nccl needs the same NCCL settings in all members, but "
                    f"{variable} is {ours.get(variable, 'not set')} in {first} and "
                    f"{theirs.get(variable, 'not set')} in {name}: set it on both, or on neither"
                )


def _check_ipc(
    places: Mapping[str, Place], on_cpu: Sequence[str], parallel: ParallelSection
) -> None:
    """Raises ConfigError for places that do not share memory, or weights of several ranks."""
    first, *further = places
    if elsewhere := [name for name in further if places[name].host_id != places[first].host_id]:
        raise ConfigError(
            f"weights.transport ipc works within one host, but {elsewhere[0]} runs on another "
            f"one than {first}: set nccl, and give each process its own GPU"
        )
    if on_cpu and len(on_cpu) < len(places):
        raise ConfigError(
            f"weights.transport ipc joins either GPUs or CPUs, but {on_cpu[0]} computes on the "
            "CPU: set gloo"
        )
    if parallel.pp * parallel.ep > 1:
        raise ConfigError(
            f"weights.transport ipc takes all weights from one trainer rank: "
            f"learner.parallel.pp and ep must be 1, got {parallel.pp} and {parallel.ep}; set "
            "nccl, and give each process its own GPU"
        )
