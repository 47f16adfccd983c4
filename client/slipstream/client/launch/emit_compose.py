"""Writes the roles as a file of Docker Compose: each host starts its role, and has an env file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.client.launch.roles import (
    LEARNER,
    ROLLOUT_SERVER,
    Role,
    Site,
    learner_role,
    roles_of,
)
from slipstream.client.launch.template import filled_template
from slipstream.core.configuration.config_file import load_config

TEMPLATE = Path(__file__).with_name("docker-compose.template.yml")
# A container has the same file names on every host; the env file has all other values.
PLACES = (
    'run.name="${RUN_NAME}"',
    'run.dir="/runs"',
    'model.path="/models/policy"',
    "learner.world_size=${LEARNER_WORLD_SIZE}",
    "learner.ranks_per_node=${LEARNER_RANKS_PER_NODE}",
    'queue.kind="redis"',
    'queue.redis_url="rediss://${QUEUE_HOST}:${QUEUE_PORT:-6380}/0'
    '?ssl_ca_certs=/run/secrets/tls_ca"',
)
VARIABLES = {
    "RUN_NAME": "a name for the run, the same on all hosts",
    "LEARNER_WORLD_SIZE": "number of trainer ranks on all hosts together",
    "LEARNER_RANKS_PER_NODE": "number of trainer ranks on each learner host",
    "QUEUE_HOST": "host of the queue, the same on all hosts",
}
# Values of the variables for the checks of the settings, and the users of the queue.
STAND_INS = (
    "run.name=run",
    "learner.world_size=1",
    "learner.ranks_per_node=1",
    "queue.kind=redis",
    "queue.redis_url=rediss://queue/0",
    "queue.controller.user=controller",
    "queue.controller.password_file=/run/secrets/redis_controller_password",
    "queue.rollout_server.user=rollout",
    "queue.rollout_server.password_file=/run/secrets/redis_rollout_password",
    "security.tls_ca=/run/secrets/tls_ca",
    "security.token_file=/run/secrets/token",
    "security.tls_certificate=/run/secrets/tls_certificate",
    "security.tls_key=/run/secrets/tls_key",
)
# The hosts may be started in any order, and a refused server would be refused again.
PATIENT = ("--connect-timeout-s=3600", "--final")


def compose_file(path: Path, overrides: Sequence[str], config_file: str) -> str:
    """Returns the compose file of a run, which mounts the settings from `config_file`.

    This path is relative to the compose file.
    """
    config = load_config(path, [*overrides, *STAND_INS])
    site = Site("/etc/slipstream/config.toml", (*overrides, *PLACES))
    roles = roles_of(config, site, on_gpus=False)
    learner, server = roles[LEARNER], roles[ROLLOUT_SERVER]
    further = learner_role(config, site, on_gpus=False, is_first=False)
    text = filled_template(
        TEMPLATE,
        config=config_file,
        learner=_service(learner).replace("${NODE_RANK}", "0"),
        # Without a number in the env file the command line refuses to start.
        learner_node=_service(further, probe=False).replace("${NODE_RANK}", "${NODE_RANK:-unset}"),
        rollout_server=_service(server, *PATIENT),
    )
    meanings = {each.name: each.meaning for each in (*learner.variables, *server.variables)}
    for name, meaning in (meanings | VARIABLES).items():
        # If the variable is not set, Compose stops with these words.
        text = text.replace(f"${{{name}}}", f"${{{name}:?{meaning}}}", 1)
    return text


def _service(role: Role, *options: str, probe: bool = True) -> str:
    """Returns the YAML of a role's service, from the command to the grace period.

    `options` are added to the command; `probe` adds the health check.
    """
    secrets = [Path(secret.file).name for secret in role.secrets]
    lines = ["    command:", *_items([*role.command, *options], 6)]
    lines += ["    secrets:", *_items(secrets, 6)]
    if probe:
        lines += ["    healthcheck:", "      test:", *_items(["CMD", *role.health.command], 8)]
        lines += ["      interval: 15s", "      timeout: 20s", "      retries: 3"]
        lines += [f"      start_period: {role.health.patience_s:.0f}s"]
    restart = f"on-failure:{role.restarts}" if role.restarts else "no"
    lines += [f'    restart: "{restart}"', f"    stop_grace_period: {role.grace_s:.0f}s"]
    return "".join(f"{line}\n" for line in lines)


def _items(words: Sequence[str], indent: int) -> list[str]:
    return [f"{' ' * indent}- {word}" for word in words]
