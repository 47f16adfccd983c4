"""Tests a run's algorithm: `python -m slipstream.extensions.proofs.trainer < FILE`.

FILE has the resolved settings of a run, in TOML. Each function is tested by itself, on the CPU.
"""

import sys
import tomllib

import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import USAGE_ERROR, ConfigError
from slipstream.core.settings.algorithm_section import KINDS
from slipstream.core.settings.config import Config
from slipstream.extensions.proofs.proof import EpisodeProof
from slipstream.extensions.proofs.token_proof import TokenProof
from slipstream.learner.algorithms.functions import function_of, load_functions


def faults_of(config: Config) -> list[str]:
    """Returns one line for each property that a function of the algorithm lacks."""
    try:
        load_functions(config)
    except ConfigError as error:
        return [str(error)]
    found = []
    for kind in KINDS:
        if kind in ("loss", "weight"):
            proof = TokenProof(function_of(config.algorithm, kind), config.needs_reference)
            found += proof.faults()
        else:
            found += EpisodeProof(config.algorithm, kind, config.critic is not None).faults()
    return found


def main() -> int:
    """Prints each fault on stderr; returns 2 if there is one, else 0."""
    # The tensors are small.
    torch.set_num_threads(1)
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    faults = faults_of(config)
    for fault in faults:
        print(f"slipstream: {fault}", file=sys.stderr)
    return USAGE_ERROR if faults else 0


if __name__ == "__main__":
    sys.exit(main())
