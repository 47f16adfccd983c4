"""Checks a user's own functions: `python -m slipstream.learner.algorithms.functions_check < FILE`.

FILE has the resolved settings of a run, in TOML. The check imports each function, validates its
arguments, and calls losses and weights with three tokens. Without torch it checks only reward
functions and filters.
"""

import importlib.util
import sys

from slipstream.core.configuration.config_file import run_check
from slipstream.core.environment_rules import objectives_of
from slipstream.core.errors import WARNING, ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS_OF_TOKENS
from slipstream.learner.algorithms.functions import function_of, load_functions


def check_functions(config: Config) -> None:
    """Raises ConfigError for the first function that cannot work."""
    # A controller's host may have no torch.
    if importlib.util.find_spec("torch") is None:
        load_functions(config, ("reward", "filter"))
        return
    from slipstream.learner.algorithms.losses import reads_behavior, step_columns

    load_functions(config)
    has_reference = config.needs_reference
    step_columns(*objectives_of(config).values(), has_reference=has_reference)
    weight = config.algorithm.weight
    loss = function_of(config.algorithm, "loss")
    known = {"has_reference": has_reference, "has_versions": config.algorithm.reads_versions}
    if loss.is_own and weight != "none" and reads_behavior(loss, **known):
        print(
            f"{WARNING}algorithm.loss {loss.name} reads behavior_logprobs, and algorithm.weight = "
            f"{weight!r} corrects for the policy that sampled, too: if the loss does so by itself, "
            "set algorithm.weight = 'none'",
            file=sys.stderr,
        )
    if config.replays_sampling:
        return
    for name, (value, neutral) in config.sampling.cuts.items():
        for kind in FUNCTIONS_OF_TOKENS:
            function = function_of(config.algorithm, kind)
            if function.is_own and reads_behavior(function, **known):
                raise ConfigError(
                    f"{name} = {value!r} leaves out tokens that the learner's policy has, and "
                    f"algorithm.{kind} {function.name} reads behavior_logprobs, which are of the "
                    f"others alone: set {name} = {neutral!r} (evaluations may have their own)"
                )


if __name__ == "__main__":
    sys.exit(run_check(check_functions))
