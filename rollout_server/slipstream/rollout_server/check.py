"""Checks that vLLM takes a run's settings: `python -m slipstream.rollout_server.check < FILE`.

The types of its arguments decide, and its lists of parsers. No model is read, no engine started.
"""

from __future__ import annotations

import os
import sys
import tomllib
from itertools import chain

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.exit_codes import USAGE_ERROR
from slipstream.core.settings.engine_table import SECTION
from slipstream.rollout_server import process


def main() -> int:
    """Returns 0, or 2 with the first fault as the last line of stderr."""
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    server = config.rollout_server
    # vLLM reads these when it is imported.
    os.environ.update(process.engine_environment(server, on_cpu=process.is_cpu_build()))
    try:
        from slipstream.rollout_server.vllm.passed_table import parser_problems, table_problems
    except ImportError as error:
        problem: str | None = f"{SECTION} cannot be checked: {error}; vLLM 0.32.0 was tested"
    else:
        problem = next(chain(table_problems(server.engine), parser_problems(server)), None)
    if problem is not None:
        print(f"slipstream: {problem}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
