"""The job group of deploy/skypilot, as a shell and our command line read it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from slipstream.client.cli import parse
from slipstream.core.configuration.config_file import load_config
from support.rigs.completed import completed

DEPLOY = Path(__file__).parents[4] / "deploy"
CONFIG = DEPLOY / "configs" / "quickstart.toml"
PLACE = "/home/me/slipstream"


def tasks() -> list[dict[str, Any]]:
    _, *tasks = yaml.safe_load_all((DEPLOY / "skypilot" / "run.yaml").read_text())
    return tasks


@pytest.mark.process
def test_the_shell_of_a_task_calls_a_command_of_ours() -> None:
    environ = {"HOME": "/home/me", "SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin"}
    for task in tasks():
        script = task["run"].replace("exec slipstream", "printf '%s\\n'")
        shown = completed(["bash", "-c", script], env=environ, check=True)
        arguments = parse(shown.stdout.splitlines())
        config = load_config(CONFIG, arguments.overrides)
        assert str(arguments.path) == f"{PLACE}/config.toml"
        files = [config.model.path, config.security.token_file, config.security.tls_ca]
        mounted = {name.replace("~", "/home/me") for name in task["file_mounts"]}
        assert {str(file) for file in files} < mounted
        if task["name"] == "learner":
            assert (arguments.node_rank, arguments.master) == (
                1,
                "learner-0.first:29500",
            )
            assert str(config.run_dir) == "/runs/first"
            assert f"{PLACE}/secrets/server.key" in mounted
        else:
            assert arguments.controller == "learner-0.first:7070"
            assert (arguments.server_id, arguments.connect_timeout_s) == (
                task["name"],
                3600,
            )
            # The key of the controller's certificate stays with the learner.
            assert config.security.tls_key is None
            token = task["file_mounts"]["~/slipstream/secrets/token"]
            assert token == "secrets/rollout_server_token"


def test_servers_are_spot_machines_and_the_group_ends_with_the_learner() -> None:
    header, *_ = yaml.safe_load_all((DEPLOY / "skypilot" / "run.yaml").read_text())
    assert (header["execution"], header["primary_tasks"]) == ("parallel", ["learner"])
    spot = {task["name"]: task["resources"]["use_spot"] for task in tasks()}
    assert spot == {"learner": False, "rollout-server-0": True}
    # The packages of the machine's own Python are another matter.
    for task in tasks():
        assert "uv venv --clear --python 3.12 ~/slipstream/venv\n" in task["setup"]
