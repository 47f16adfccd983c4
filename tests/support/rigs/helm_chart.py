"""The Helm chart of deploy/kubernetes, rendered by Helm itself, with the secrets of its script."""

import os
from pathlib import Path
from typing import Any

import yaml

from support.rigs import tools
from support.rigs.completed import completed

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "kubernetes"
TOOLS = tools.folder("kubernetes")
MISSING = (
    None
    if (TOOLS / "helm").exists() and (TOOLS / "kubectl").exists()
    else f"no helm and kubectl here: {tools.HOW}"
)


class ChartRefused(Exception):
    """Helm refused the values; the message is its own."""


def rendered(run: str, *options: str, config: Path | None = None) -> str:
    """What `helm install RUN` sends to Kubernetes, with the quickstart's settings by default."""
    config = config or DEPLOY / "configs" / "quickstart.toml"
    command = [
        str(TOOLS / "helm"),
        "template",
        run,
        str(CHART),
        f"--set-file=config={config}",
    ]
    done = completed([*command, *options])
    if done.returncode:
        raise ChartRefused(done.stderr)
    return done.stdout


def secrets_of(run: str, folder: Path, *hosts: str) -> str:
    """The run's secrets, from certificates that are made in `folder`."""
    completed([str(DEPLOY / "make_certificates.sh"), str(folder), *hosts], check=True)
    environ = os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"}
    return completed(
        [str(CHART / "make_secrets.sh"), run, str(folder)], env=environ, check=True
    ).stdout


def resources(manifests: str) -> list[dict[str, Any]]:
    return [manifest for manifest in yaml.safe_load_all(manifests) if manifest]
