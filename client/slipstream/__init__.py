"""`slipstream.run` starts a run from Python; `slipstream.__version__` is the installed version.

The packages below have source roots of their own, which an editable install puts on Python's path.
"""

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.client.started_run import Run, run

    __version__: str

__path__ = extend_path(__path__, __name__)
__all__ = ["Run", "run"]


def __getattr__(name: str) -> object:
    # Environments of a run import this package, too: they need neither gRPC nor the settings.
    if name in __all__:
        from slipstream.client import started_run

        return getattr(started_run, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("slipstream-rl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
