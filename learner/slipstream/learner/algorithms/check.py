"""Checks a user's own functions: `python -m slipstream.learner.algorithms.check < FILE`.

FILE has the resolved settings of a run, in TOML. The check imports each function, validates its
arguments, and calls losses and weights with three tokens. Without torch it checks only reward
functions and filters.
"""

import importlib.util
import sys

from slipstream.core.configuration.config_file import run_check
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.functions import load_functions


def check_functions(config: Config) -> None:
    """Raises ConfigError for the first function that cannot work."""
    # A controller's host may have no torch.
    if importlib.util.find_spec("torch") is None:
        load_functions(config, ("reward", "filter"))
        return
    from slipstream.learner.algorithms.losses import step_columns

    load_functions(config)
    step_columns(config.algorithm, has_reference=config.needs_reference)


if __name__ == "__main__":
    sys.exit(run_check(check_functions))
