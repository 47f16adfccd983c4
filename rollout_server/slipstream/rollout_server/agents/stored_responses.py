"""The responses of one episode that its later requests may name as `previous_response_id`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.rollout_server.agents.conversations import Turn
from slipstream.rollout_server.agents.sampling_rule import RefusedRequest

PREVIOUS = "previous_response_id"


@dataclass(frozen=True)
class _Stored:
    """The items up to and with those of a response, and its turn."""

    items: list[Any]
    turn: Turn


class StoredResponses:
    """What OpenAI's API keeps of responses, for as long as the episode lasts.

    A request with PREVIOUS becomes the one that a client without a store would send: all items of
    the earlier response, then its own.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Stored] = {}

    def keep(self, response_id: str, asked: list[Any], output: list[Any], turn: Turn) -> None:
        """Stores the response to a request with the items `asked`."""
        self._known[response_id] = _Stored([*asked, *output], turn)

    def expand(self, body: dict[str, Any]) -> Turn | None:
        """Writes the whole input into `body`; returns the turn that it continues, if it names one.

        RefusedRequest for a response that is not stored.
        """
        if not isinstance(previous := body.get(PREVIOUS), str):
            return None
        found = self._known.get(previous)
        if found is None:
            raise RefusedRequest(
                f"Previous response with id {previous[:200]!r} not found.",
                code="previous_response_not_found",
                param=PREVIOUS,
            )
        del body[PREVIOUS]
        body["input"] = found.items + items_of(body)
        return found.turn


def items_of(body: dict[str, Any]) -> list[Any]:
    """Returns the input of a request as a list of items."""
    given = body.get("input")
    return list(given) if isinstance(given, list) else [{"role": "user", "content": given}]
