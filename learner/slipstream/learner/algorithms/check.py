"""Checks a user's own functions: `python -m slipstream.learner.algorithms.check < FILE`.

FILE has the resolved settings of a run, in TOML. The check imports each function, validates its
arguments, and calls losses and weights with three tokens. Without torch it checks only reward
functions and filters.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import USAGE_ERROR, SlipstreamError
from slipstream.learner.algorithms.functions import load_functions


def main() -> int:
    """Checks the functions; returns 0, or 2 after it prints the fault as last line of stderr."""
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    try:
        # A controller's host may have no torch.
        if importlib.util.find_spec("torch") is None:
            load_functions(config, ("reward", "filter"))
            return 0
        from slipstream.learner.algorithms.token_functions import step_columns

        load_functions(config)
        step_columns(config.algorithms.distinct, has_reference=config.needs_reference)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
