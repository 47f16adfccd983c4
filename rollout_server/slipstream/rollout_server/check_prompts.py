"""Renders prompts of environments with a model's chat template, for `slipstream check`.

    python -m slipstream.rollout_server.check_prompts < QUESTION

QUESTION is JSON: the folder `model`, a file `template` or null, `values`, and `environments`, each
with `values` as JSON text and serialized `openings` in base64. The answer is JSON too: for each
opening `tokens` and `fault`, such as a message that the template leaves out.
"""

import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

from slipstream.core.errors import USAGE_ERROR, ConfigError
from slipstream.rollout_server.chat import ChatMessage, TemplateInputs
from slipstream.rollout_server.episodes.renderer import Renderer, RenderingFailed
from slipstream.v1 import environment_pb2


def main() -> int:
    """Answers; returns 0, or 2 with the cause on stderr if there is no template."""
    asked = json.loads(sys.stdin.read())
    template = asked["template"] and Path(asked["template"])
    try:
        renderer = Renderer(Path(asked["model"]), template=template, values=asked["values"])
    except (ConfigError, OSError, ValueError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return USAGE_ERROR
    answers = [
        [_look(renderer, b64decode(opening), each["values"]) for opening in each["openings"]]
        for each in asked["environments"]
    ]
    print(json.dumps(answers))
    return 0


def _look(renderer: Renderer, data: bytes, values: str) -> dict[str, Any]:
    opening = environment_pb2.Observation.FromString(data)
    messages = tuple(map(ChatMessage.from_pb, opening.messages))
    inputs = TemplateInputs(opening.tools_json, values)
    try:
        tokens = len(renderer.prompt(messages, inputs))
        if opening.given_reply:
            renderer.reply(opening.given_reply, messages, inputs)
        return {"tokens": tokens, "fault": ""}
    except RenderingFailed as error:
        return {"tokens": 0, "fault": str(error)}


if __name__ == "__main__":
    sys.exit(main())
