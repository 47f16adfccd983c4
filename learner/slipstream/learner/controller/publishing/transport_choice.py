"""Chooses the transport of weights, and which servers can use it to receive from the trainer."""

import contextlib
from collections.abc import Mapping

from slipstream.core.errors import ConfigError
from slipstream.learner.controller.run import Run
from slipstream.protocol.weights.transports import Place, choose_transport
from slipstream.v1 import fleet_pb2, weights_pb2


def place_from_pb(message: weights_pb2.Place) -> Place:
    """Returns the `Place` (host, GPUs and NCCL settings) in a message."""
    return Place(message.host_id, tuple(message.gpus), dict(message.nccl))


def choose_for(run: Run, servers: Mapping[str, weights_pb2.Place]) -> tuple[str, list[str]]:
    """Returns the transport for these servers, and for each server the reason why it is left out.

    A server with the reason "" takes part. The transport is "" if no server takes part.
    """
    places = {name: place_from_pb(message) for name, message in servers.items()}
    # Usually all servers fit; to add them one by one takes quadratic time.
    with contextlib.suppress(ConfigError):
        return _choose(run, places) if places else "", [""] * len(places)
    fitting: dict[str, Place] = {}
    transport, problems = "", []
    for name, place in places.items():
        wider = fitting | {name: place}
        try:
            transport = _choose(run, wider)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems.append("")
            fitting = wider
    return transport, problems


def _choose(run: Run, places: Mapping[str, Place]) -> str:
    transport, parallel = run.config.weights.transport, run.config.learner.parallel
    return choose_transport(transport, run.progress.learner_places, places, parallel=parallel)


def misfit(run: Run, hello: fleet_pb2.ServerHello) -> str:
    """Returns why a server can never get weights, or "" if it can.

    Also returns "" if no trainer has registered yet, unless only one side uses storage.
    """
    is_by_storage = run.config.weights.storage_url is not None
    if hello.from_storage != is_by_storage:
        both = "for the learner and every server of a run, or for none"
        differs = "it has a weights.storage_url, but the trainer sends the weights"
        if is_by_storage:
            differs = "it has no weights.storage_url, but the run's weights are in storage"
        return f"{differs}: set it {both}"
    if is_by_storage or not run.progress.learner_places:
        return ""
    _, (problem,) = choose_for(run, {hello.server_id: hello.place})
    return problem
