"""A container image of an OpenEnv server: how Docker starts it, and how it ends with its worker."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from slipstream.core.errors import ConfigError

# The port at which every image of OpenEnv answers.
INSIDE_PORT = 8000
# Seconds for Docker to say what it knows of an image.
ASK_LIMIT_S = 30.0
# Runs the image's own program, and ends it when standard input ends: that is when Docker's client
# is gone, whatever has killed it or the worker.
_UNTIL_THE_INPUT_ENDS = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ cat <&3 >/dev/null; kill "$server"; sleep 5; kill -9 "$server"; } 2>/dev/null &
wait "$server"
"""


def container_command(image: str, options: Sequence[str]) -> list[str]:
    """Returns the command that runs `image` and serves it on loopback at `{port}`.

    `options` are those of `docker run`. ConfigError when Docker or the image is missing.
    """
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise ConfigError(f"image_options must be a list of texts, got {options!r}")
    return [
        *("docker", "run", "--rm", "--init", "--interactive", "--pull", "never"),
        *("--publish", f"127.0.0.1:{{port}}:{INSIDE_PORT}"),
        *options,
        *("--entrypoint", "/bin/sh", image, "-c", _UNTIL_THE_INPUT_ENDS, "sh"),
        *_program_of(image),
    ]


def _program_of(image: str) -> list[str]:
    """Returns the program that the image runs, with its arguments."""
    asked = ["docker", "image", "inspect", "--format", "{{json .Config}}", image]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_LIMIT_S)
    except OSError as error:
        raise ConfigError(
            f"image {image!r} needs Docker, and the program docker does not start "
            f"({error.strerror}): install it, or give base_url or command"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"docker said nothing of image {image!r} in {ASK_LIMIT_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise ConfigError(
            f"docker shows no image {image!r} ({said}): on each machine with a rollout server "
            "Docker must run, and the image be pulled or built"
        )
    config = json.loads(done.stdout)
    program = [*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())]
    if not program:
        raise ConfigError(f"image {image!r} starts no program: it needs CMD or ENTRYPOINT")
    return program
