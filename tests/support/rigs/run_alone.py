"""How to run one test by itself."""

import os
import shlex
import sys

# Variables that `make` sets for its tests.
OF_MAKE = ("FUZZ", "TORCHDYNAMO_DISABLE")


def alone(nodeid: str) -> str:
    """The words for a shell that run the test as it ran here."""
    settings = [f"{name}={os.environ[name]}" for name in OF_MAKE if name in os.environ]
    return shlex.join([*settings, sys.executable, "-m", "pytest", nodeid])
