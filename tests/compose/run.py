"""Builds the images and trains with them under Docker Compose: on one host, then on several.

Needs Docker Engine with Compose and Python's standard library; `make compose-test` calls it. Each
of several hosts is a container on a network of their own, whose network and shared memory the
containers of that host use. Everything that is started has one prefix before its name, and is
removed by it at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from engine import Engine, Failed, call
from hosts import ROOT, Site
from scenes import one_host, several_hosts, tell

BUILD_LIMIT_S = 3600.0
IMAGE = "slipstream-compose-test:cpu"


def parser() -> argparse.ArgumentParser:
    """The arguments of the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image", help="test this image, and build none")
    parser.add_argument(
        "--scene",
        choices=("one-host", "several-hosts"),
        help="default: one after the other",
    )
    parser.add_argument(
        "--queue-image", help="Valkey or Redis; default: that of the compose file"
    )
    parser.add_argument(
        "--build",
        action="append",
        default=[],
        metavar="OPTION",
        help="of docker build, such as --build=--build-arg=PYTHON_IMAGE=NAME; may come again",
    )
    parser.add_argument(
        "--subnet",
        default="10.213.47",
        metavar="N.N.N",
        help="of the several hosts, a /24 network that is free; default: 10.213.47",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "build" / "compose-test",
        help="where a failure's logs are kept",
    )
    return parser


def missing() -> str | None:
    """Says why nothing can be tested here; None where it can."""
    if shutil.which("docker") is None:
        return "there is no program `docker`"
    try:
        call(["docker", "version"], 60.0)
        call(["docker", "compose", "version"], 60.0)
    except Failed as error:
        return str(error)
    return None


def build(options: list[str]) -> str:
    """Builds the CPU image; its name."""
    file = ["--file", str(ROOT / "deploy" / "cpu.Dockerfile")]
    call(["docker", "build", *file, "--tag", IMAGE, *options, str(ROOT)], BUILD_LIMIT_S)
    return IMAGE


def tell_versions(image: str, queue_image: str) -> None:
    """Prints what is tested with."""
    engine = call(
        ["docker", "version", "--format", "{{.Server.Version}}"], 60.0
    ).strip()
    ask = [
        "docker",
        "run",
        "--rm",
        "--network",
        "none",
        queue_image,
        "valkey-server",
        "--version",
    ]
    tell(f"{queue_image}: {' '.join(call(ask, 600.0).split()[:3])}")
    compose = call(["docker", "compose", "version", "--short"], 60.0).strip()
    size = int(
        call(["docker", "image", "inspect", "--format", "{{.Size}}", image], 60.0)
    )
    tell(f"Docker Engine {engine}, Compose {compose}; {image} has {size / 1e9:.2f} GB")


def main() -> int:
    """Exit codes: 0 everything was as it should be, or no engine is there; 1 something was not."""
    arguments = parser().parse_args()
    cause = missing()
    if cause is not None:
        print(f"skipped: no Docker Engine with Compose here: {cause}")
        return 0
    # SIGTERM ends this program and everything that it has started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="slipstream-compose-"))
    # Containers of another user go through it.
    folder.chmod(0o755)
    engine = Engine(f"slipstream-compose-test-{os.getpid()}", arguments.image or IMAGE)
    queue_image = arguments.queue_image or "valkey/valkey:9.1"
    try:
        if arguments.image is None:
            tell("the image is built")
            build(arguments.build)
        tell_versions(engine.image, queue_image)
        if arguments.scene in (None, "one-host"):
            one_host(Site(engine, folder / "one", queue_image))
        if arguments.scene in (None, "several-hosts"):
            several_hosts(
                Site(engine, folder / "several", queue_image), arguments.subnet
            )
    except Failed as error:
        tell(f"FAILED: {error}")
        engine.keep_logs(arguments.logs)
        for runs in folder.glob("**/runs"):
            target = arguments.logs / runs.relative_to(folder)
            shutil.copytree(runs, target, dirs_exist_ok=True)
        tell(
            f"logs of the containers and folders of the runs are kept in {arguments.logs}"
        )
        return 1
    finally:
        engine.remove_all()
        shutil.rmtree(folder)
    tell("everything was as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
