"""Checks that vLLM accepts a run's settings, and that a chat template renders prompts.

    python -m slipstream.rollout_server.engine_check < FILE

Values are checked against the types of vLLM's arguments, and names of parsers against vLLM's lists.
A chat template of the settings is tried, and any if a parser of tool calls or a value for it is
set. No weights are read, and no engine is started.

    python -m slipstream.rollout_server.engine_check prompts < QUESTION

QUESTION is JSON: the folder `model`, a file `template` or null, `values`, and `environments`, each
with `values` as JSON text and serialized `openings` in base64. The answer is JSON too: for each
opening `tokens`, `fault`, such as a message that the template leaves out, and what is `told` of it.
"""

import json
import sys
from base64 import b64decode
from itertools import chain
from pathlib import Path
from typing import Any

from slipstream.core.configuration.config_file import run_check
from slipstream.core.errors import USAGE_ERROR, WARNING, ConfigError
from slipstream.core.models.model_files import missing_tokenizer
from slipstream.core.settings.config import Config
from slipstream.core.settings.engine_table import SECTION
from slipstream.rollout_server import child_processes
from slipstream.rollout_server.chat import ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.v1 import environment_pb2


def check_settings(config: Config) -> None:
    """Raises ConfigError for the first value or variable that vLLM, or a template, does not take.

    Prints a warning if a tool parser is set but the chat template does not render tools.
    """
    server = config.rollout_server
    child_processes.set_engine_environment(config, on_cpu=child_processes.is_cpu_build())
    for problem in child_processes.variable_problems():
        raise ConfigError(problem)
    if server.engine or server.tool_parser or server.reasoning_parser:
        try:
            from slipstream.rollout_server.vllm.passed_table import parser_problems, table_problems
        except ImportError as error:
            raise ConfigError(
                f"{SECTION} cannot be checked: {error}; vLLM 0.32.0 was tested"
            ) from error
        for problem in chain(table_problems(server.engine), parser_problems(server)):
            raise ConfigError(problem)
    folder = config.model.path
    template = server.chat_template
    sections = [section for section in config.played if section.chat_template_kwargs]
    has_values = bool(sections or server.chat_template_kwargs)
    if not (template or server.tool_parser or has_values) or missing_tokenizer(folder, template):
        return
    renderer = Renderer(folder, template=template, values=server.chat_template_kwargs)
    for section in sections:
        if cause := renderer.unread(section.chat_template_kwargs):
            raise ConfigError(f"{section.name}: {cause}")
    if server.tool_parser is not None and (cause := _unwritten_tools(renderer, template or folder)):
        print(f"{WARNING}rollout_server.tool_parser is set, but {cause}", file=sys.stderr)


def _unwritten_tools(renderer: Renderer, place: Path) -> str:
    """Returns why a model sees no tools with the template in `place`; "" if it sees them."""
    try:
        if renderer.writes_tools:
            return ""
        cause = "writes no tools, so that the model never sees those that it is offered"
    except RenderingFailed as error:
        cause = f"fails where tools are offered: {error}"
    return (
        f"the chat template in {place} {cause}: name one that writes them in "
        "rollout_server.chat_template, or describe them in messages"
    )


def check_prompts() -> int:
    """Answers the question on stdin; returns 0, or 2 with the cause on stderr if it cannot."""
    question = json.loads(sys.stdin.read())
    template = question["template"] and Path(question["template"])
    folder = Path(question["model"])
    try:
        renderer = Renderer(folder, template=template, values=question["values"])
    except (ConfigError, OSError, ValueError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return USAGE_ERROR
    answers = [
        [
            _look(renderer, b64decode(opening), environment["values"], template or folder)
            for opening in environment["openings"]
        ]
        for environment in question["environments"]
    ]
    print(json.dumps(answers))
    return 0


def _look(renderer: Renderer, data: bytes, values: str, place: Path) -> dict[str, Any]:
    opening = environment_pb2.Observation.FromString(data)
    messages = tuple(map(ChatMessage.from_pb, opening.messages))
    inputs = TemplateInputs(opening.tools_json, values)
    try:
        tokens = len(renderer.prompt(messages, inputs))
        if opening.given_reply:
            renderer.reply(opening.given_reply, messages, inputs)
    except RenderingFailed as error:
        return {"tokens": 0, "fault": str(error), "told": []}
    remarks = []
    if special := renderer.special_in(messages):
        remarks.append(f"have a message that spells {special}: the model reads that token")
    if inputs.tools and (cause := _unwritten_tools(renderer, place)):
        remarks.append(f"offer tools, but {cause}")
    return {"tokens": tokens, "fault": "", "told": remarks}


if __name__ == "__main__":
    sys.exit(check_prompts() if sys.argv[1:] == ["prompts"] else run_check(check_settings))
