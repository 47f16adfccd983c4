"""The phases of one publish on a rollout server, and the events that end each: a pure function.

RECEIVING --loaded--> LOADED --committed--> SERVING
                             --probed-----> PROBING --passed--> SERVING
any phase --failed--> FAILED, which no event leaves: the next publish begins at RECEIVING
"""

from enum import Enum


class Phase(Enum):
    """The phases; only in PROBING and SERVING the engine samples with the new weights."""

    # The engine prepares, waits for buckets and loads them.
    RECEIVING = "receiving"
    # The engine has loaded all buckets; it samples nothing before the commit.
    LOADED = "loaded"
    # The engine samples; trajectories wait for the verdict on the probe.
    PROBING = "probing"
    SERVING = "serving"
    # The weights may not be used; the engine is paused.
    FAILED = "failed"


class PublishEvent(Enum):
    """The events that move a publish from one phase to the next."""

    LOADED = "loaded"
    COMMITTED = "committed"
    # Committed with a probe, whose verdict comes later.
    PROBED = "probed"
    PASSED = "passed"
    # An error, an abort, a wrong commit, a rejected probe, or no verdict in time.
    FAILED = "failed"


_NEXT = {
    (Phase.RECEIVING, PublishEvent.LOADED): Phase.LOADED,
    (Phase.LOADED, PublishEvent.COMMITTED): Phase.SERVING,
    (Phase.LOADED, PublishEvent.PROBED): Phase.PROBING,
    (Phase.PROBING, PublishEvent.PASSED): Phase.SERVING,
}


def next_phase(phase: Phase, event: PublishEvent) -> Phase:
    """Returns the phase after `event`. Raises ValueError where the event cannot happen."""
    if event is PublishEvent.FAILED:
        return Phase.FAILED
    following = _NEXT.get((phase, event))
    if following is None:
        raise ValueError(f"a publish in the phase {phase.value} cannot be {event.value}")
    return following
