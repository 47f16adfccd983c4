"""Tests a run's algorithm: `python -m slipstream.extensions.proofs.trainer < FILE`.

FILE has the resolved settings of a run, in TOML. Each function is tested by itself, on the CPU.
"""

import sys

import torch
from slipstream.core.configuration.config_file import run_check
from slipstream.core.errors import FACT, ConfigError
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS_OF_TOKENS, KINDS
from slipstream.extensions.proofs.facts import facts_of_filter, facts_of_tokens
from slipstream.extensions.proofs.proof import EpisodeProof
from slipstream.extensions.proofs.token_proof import TokenProof
from slipstream.learner.algorithms.functions import function_of, load_functions


def prove(config: Config) -> None:
    """Raises ConfigError, with a line for each property that a function of the algorithm lacks."""
    # The tensors are small.
    torch.set_num_threads(1)
    load_functions(config)
    lines: list[str] = []
    facts: list[str] = []
    for kind in KINDS:
        function = function_of(config.algorithm, kind)
        if kind in FUNCTIONS_OF_TOKENS:
            proof = TokenProof(
                function,
                config.needs_reference,
                config.algorithm.reads_versions,
            )
            lines += proof.faults()
            if function.is_own and not lines:
                facts += facts_of_tokens(proof)
        else:
            lines += EpisodeProof(config.algorithm, kind, config.critic is not None).faults()
            if kind == "filter" and function.is_own and not lines:
                facts += facts_of_filter(config.algorithm)
    if lines:
        # Every line is marked, as an error of any command is.
        raise ConfigError("\nslipstream: ".join(lines))
    for fact in facts:
        print(f"{FACT}{fact}")


if __name__ == "__main__":
    sys.exit(run_check(prove))
