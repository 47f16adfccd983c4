"""The public names for running untrusted programs in a sandbox.

The names are imported on first use, since the launcher, which starts for each program, needs none
of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.environments.sandbox.plan import Limits
    from slipstream.environments.sandbox.sandbox import Finished, Sandbox, StartedProgram

__all__ = ["Finished", "Limits", "Sandbox", "StartedProgram"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from slipstream.environments.sandbox import sandbox

        return getattr(sandbox, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
