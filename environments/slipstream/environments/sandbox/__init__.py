"""The public names for running untrusted programs in a sandbox."""

from slipstream.environments.sandbox.plan import Limits
from slipstream.environments.sandbox.sandbox import Finished, Sandbox, StartedProgram

__all__ = ["Finished", "Limits", "Sandbox", "StartedProgram"]
