"""Says which sandboxes work on this machine, for `slipstream doctor`.

    python -m slipstream.environments.sandbox.report

Its output is a JSON list: each of `BACKENDS` with what its trial found.
"""

import json
import sys
from dataclasses import asdict

from slipstream.environments.sandbox.sandbox import BACKENDS, trial


def main() -> None:
    """Tries each backend, and prints what was found."""
    trials = [{"backend": backend} | asdict(trial(backend)) for backend in BACKENDS]
    json.dump(trials, sys.stdout)


if __name__ == "__main__":
    main()
