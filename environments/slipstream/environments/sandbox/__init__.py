"""The public names for running untrusted programs in a sandbox.

They are imported when they are used: the process that starts the programs forks itself for each
one, which takes the longer the more it has imported.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.environments.sandbox.plan import Limits
    from slipstream.environments.sandbox.sandbox import Finished, Sandbox, StartedProgram

__all__ = ["Finished", "Limits", "Sandbox", "StartedProgram"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slipstream.environments.sandbox import sandbox

    return getattr(sandbox, name)
