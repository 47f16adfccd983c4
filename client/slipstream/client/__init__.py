"""The names that users of Slipstream import.

`Client` is imported on its first use, so that importing the other names is fast.
"""

from typing import TYPE_CHECKING

from slipstream.client.environment import (
    AgentEnvironment,
    AgentOutcome,
    Endpoint,
    Environment,
    FinishedEpisode,
    GroupReward,
    Message,
    Reply,
    ResetResult,
    StepResult,
    ToolCall,
    answer_of,
)

if TYPE_CHECKING:
    from slipstream.client.client import Client

__all__ = [
    "AgentEnvironment",
    "AgentOutcome",
    "Client",
    "Endpoint",
    "Environment",
    "FinishedEpisode",
    "GroupReward",
    "Message",
    "Reply",
    "ResetResult",
    "StepResult",
    "ToolCall",
    "answer_of",
]


def __getattr__(name: str) -> object:
    if name == "Client":
        from slipstream.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
