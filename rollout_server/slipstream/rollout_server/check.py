"""Checks that vLLM accepts a run's settings: `python -m slipstream.rollout_server.check < FILE`.

Values are checked against the types of vLLM's arguments, and names of parsers against vLLM's lists.
If a parser of tool calls is set, the chat template is tried too. No weights are read, and no engine
is started.
"""

import os
import sys
from collections.abc import Iterator
from itertools import chain

from slipstream.core.configuration.config_file import run_check
from slipstream.core.errors import WARNING, ConfigError
from slipstream.core.models.model_files import missing_tokenizer
from slipstream.core.settings.config import Config
from slipstream.core.settings.engine_table import SECTION
from slipstream.rollout_server import process


def check_settings(config: Config) -> None:
    """Prints warnings; raises ConfigError for the first value that vLLM would not take."""
    server = config.rollout_server
    # vLLM reads these variables when it is imported.
    os.environ.update(process.engine_environment(config, on_cpu=process.is_cpu_build()))
    try:
        from slipstream.rollout_server.vllm.passed_table import parser_problems, table_problems
    except ImportError as error:
        raise ConfigError(
            f"{SECTION} cannot be checked: {error}; vLLM 0.32.0 was tested"
        ) from error
    for problem in chain(table_problems(server.engine), parser_problems(server)):
        raise ConfigError(problem)
    for warning in _tool_warnings(config):
        print(f"{WARNING}{warning}", file=sys.stderr)


def _tool_warnings(config: Config) -> Iterator[str]:
    """Yields a warning if a tool parser is set but the chat template does not render tools.

    Yields nothing if the tokenizer or its chat template is missing.
    """
    server, folder = config.rollout_server, config.model.path
    if server.tool_parser is None or missing_tokenizer(folder, server.chat_template):
        return
    from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed

    template, values = server.chat_template, server.chat_template_kwargs
    try:
        if Renderer(folder, template=template, values=values).writes_tools:
            return
        cause = "writes no tools, so that the model never sees those that it is offered"
    except RenderingFailed as error:
        cause = f"fails where tools are offered: {error}"
    yield (
        f"rollout_server.tool_parser is set, but the chat template in {template or folder} "
        f"{cause}: "
        "name one that writes them in rollout_server.chat_template, or describe them in messages"
    )


if __name__ == "__main__":
    sys.exit(run_check(check_settings))
