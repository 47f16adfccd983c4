"""The settings with which no call of an agent would be kept."""

from collections.abc import Iterator

from slipstream.core.settings.tables import Tables


def problems(config: Tables) -> Iterator[str]:
    """Yields a line if the run plays no episodes of agents."""
    if config.controller.client_loop:
        yield (
            "agents.recover has no effect with controller.client_loop, whose clients play their "
            "own episodes: leave it out"
        )
