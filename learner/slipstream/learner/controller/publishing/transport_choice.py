"""Which transport joins the learner with its servers, and which servers it cannot join."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from slipstream.learner.controller.progress import RunProgress
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.weights.transports import Place, choose_transport
from slipstream.v1 import weights_pb2


def place_from_pb(message: weights_pb2.Place) -> Place:
    """The value of a message."""
    return Place(message.host_id, tuple(message.cards), dict(message.nccl))


def choose_for(
    progress: RunProgress, servers: Mapping[str, weights_pb2.Place]
) -> tuple[str, list[str]]:
    """The transport for the learner with these servers, and for each why it is left out.

    A server whose line is empty takes part. The transport is empty when none does.
    """
    places = {name: place_from_pb(message) for name, message in servers.items()}
    # Mostly all fit: to add one after another takes the square of their number.
    with contextlib.suppress(ConfigError):
        return _choose(progress, places) if places else "", [""] * len(places)
    fitting: dict[str, Place] = {}
    transport, problems = "", []
    for name, place in places.items():
        wider = fitting | {name: place}
        try:
            transport = _choose(progress, wider)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems.append("")
            fitting = wider
    return transport, problems


def _choose(progress: RunProgress, places: Mapping[str, Place]) -> str:
    config = progress.config
    return choose_transport(
        config.weights.transport,
        progress.learner_places,
        places,
        parallel=config.learner.parallel,
    )


def misfit(progress: RunProgress, name: str, place: weights_pb2.Place) -> str:
    """Why a server can never be sent weights; empty when it can, or no trainer came yet."""
    if not progress.learner_places:
        return ""
    _, (problem,) = choose_for(progress, {name: place})
    return problem
