"""Hosts as the guide to deployment sets them up: env files, folders, secrets by role."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine import Engine, call

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEPLOY = ROOT / "deploy"
# Files of make_certificates.sh, as its last words hand them out.
SECRETS = {
    "learner": ("ca.pem", "token", "server.pem", "server.key", "redis.acl")
    + ("redis_controller_password", "metrics_token"),
    "learner-node": ("ca.pem", "token"),
    "rollout-server": ("ca.pem", "token", "redis_rollout_password"),
}
SECRETS["all"] = (*SECRETS["learner"], "redis_rollout_password")
COMPOSE_LIMIT_S = 300.0
# If root runs the tests, containers run as another user.
USER = "1000:1000" if os.geteuid() == 0 else f"{os.geteuid()}:{os.getegid()}"


@dataclass(frozen=True)
class Site:
    """What all hosts of one scene share: the engine, a folder on this machine, images."""

    engine: Engine
    folder: Path
    queue_image: str

    def prepare(self, *certified: str) -> None:
        """Makes the model and the secrets, with the programs of deploy/ inside the image."""
        folder = self.folder / "made"
        folder.mkdir(parents=True)
        give_away(self.folder, folder)
        mounts = {DEPLOY: "/deploy:ro", folder: "/made"}
        make_model = (
            "python",
            "-m",
            "slipstream.learner.trainer.tiny_model",
            "/made/policy",
        )
        self.engine.run(*make_model, user=USER, mounts=mounts)
        make_certificates = ("bash", "/deploy/make_certificates.sh", "/made/secrets")
        self.engine.run(*make_certificates, *certified, user=USER, mounts=mounts)

    @property
    def runs(self) -> Path:
        """The folder of runs, which all learner nodes share."""
        return self.folder / "runs"


@dataclass(frozen=True)
class Host:
    """One host: its env file, its role and the folder of its own files."""

    site: Site
    name: str
    profile: str
    folder: Path

    def compose(self, *command: str, limit_s: float = COMPOSE_LIMIT_S) -> str:
        """Runs `docker compose` as a person on this host would."""
        files = ["--file", str(DEPLOY / "docker-compose.yml")]
        if (self.folder / "network.json").exists():
            files += ["--file", str(self.folder / "network.json")]
        env = ["--env-file", str(self.folder / "host.env"), "--profile", self.profile]
        return call(
            ["docker", "compose", "-p", self.project, *files, *env, *command], limit_s
        )

    def up(self) -> None:
        """Starts what the host's role has."""
        self.compose("up", "--detach", "--no-build")

    @property
    def project(self) -> str:
        """The name of its Compose project."""
        return f"{self.site.engine.prefix}-{self.name}"

    def container(self, service: str) -> str:
        """The container of one of its services."""
        return f"{self.project}-{service}-1"

    def hold(self, *, held: bool) -> None:
        """Lets its rollout server begin episodes, or none."""
        mark = self.folder / "environments" / "hold"
        if held:
            mark.touch()
        else:
            mark.unlink()


def make_host(
    site: Site,
    name: str,
    *,
    example: str,
    profile: str,
    variables: Mapping[str, str],
    network: str | None = None,
) -> Host:
    """Makes the folders and files of one host.

    `variables`: what differs from the example env file. `network`: a container whose network and
    shared memory stand for the host; without one it is this machine.
    """
    folder = site.folder / name
    places = {
        "SECRETS_DIR": folder / "secrets",
        "MODEL_DIR": folder / "model",
        "ENVIRONMENTS_DIR": folder / "environments",
        "QUEUE_DIR": folder / "queue",
        "RUNS_DIR": folder / "runs" if profile == "rollout-server" else site.runs,
    }
    for key, place in places.items():
        if key != "MODEL_DIR":
            place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(site.folder / "made" / "policy", places["MODEL_DIR"])
    for file in SECRETS[profile]:
        shutil.copy(site.folder / "made" / "secrets" / file, places["SECRETS_DIR"])
    shutil.copy(HERE / "letters.py", places["ENVIRONMENTS_DIR"])
    shutil.copy(HERE / "run.toml", folder / "run.toml")
    settings = read_env(DEPLOY / "env" / example) | dict(variables)
    settings |= {key: str(place) for key, place in places.items()}
    settings |= {
        "CONFIG_FILE": str(folder / "run.toml"),
        "SLIPSTREAM_USER": USER,
        "SLIPSTREAM_IMAGE": site.engine.image,
        "REDIS_IMAGE": site.queue_image,
    }
    text = "".join(f"{key}={value}\n" for key, value in settings.items())
    (folder / "host.env").write_text(text)
    if network is not None:
        joined = {"network_mode": f"container:{network}"}
        programs = dict.fromkeys(
            ("learner", "learner-node", "rollout-server"),
            joined | {"ipc": f"container:{network}"},
        )
        overrides = {"services": programs | {"redis": joined}}
        (folder / "network.json").write_text(json.dumps(overrides))
    give_away(site.runs, folder)
    return Host(site, name, profile, folder)


def read_env(path: Path) -> dict[str, str]:
    """The variables of an env file."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


def give_away(*folders: Path) -> None:
    """Gives folders with all they hold to the containers' user."""
    user, _, group = USER.partition(":")
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, int(user), int(group))
