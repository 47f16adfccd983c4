"""The roles of a run, and the files of schedulers that are made of them."""

import ast
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slipstream.client.cli import main, parse
from slipstream.client.launch.emit_scripts import ray_program, slurm_files
from slipstream.client.launch.print_roles import write_files
from slipstream.client.launch.roles import (
    LEARNER,
    ROLLOUT_SERVER,
    Roles,
    Site,
    learner_node,
    roles_of,
    whole_run,
)
from slipstream.client.launch.template import shell_word
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.rigs.namespaces import poll

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "deploy" / "configs" / "quickstart.toml"
SCHEMA = ROOT / "docs" / "roles.schema.json"
VALUES = {
    "CONTROLLER_ADDRESS": "n1:7070",
    "MASTER_ADDRESS": "n1:29500",
    "NODE_RANK": "1",
    "HOST_ADDRESS": "n2",
    "SERVER_ID": "server-3",
}


def config_of(*overrides: str) -> Config:
    return load_config(CONFIG, [f"model.path={json.dumps(str(ROOT / 'models/none'))}", *overrides])


def roles(*overrides: str, on_gpus: bool = False) -> Roles:
    return roles_of(config_of(*overrides), Site(config="run.toml"), on_gpus=on_gpus)


def filled(words: list[str], values: dict[str, str]) -> list[str]:
    """A command with the values of one instance; fails for a variable that the role lacks."""
    return [re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], word) for word in words]


def files(*overrides: str, on_gpus: bool = False) -> dict[str, str]:
    printed = roles(*overrides, on_gpus=on_gpus)
    return slurm_files(printed, "slurm", controller_port=7070, master_port=29500)


@pytest.mark.parametrize("name", [LEARNER, ROLLOUT_SERVER])
def test_the_command_of_a_role_is_one_of_ours(name: str) -> None:
    role = roles("learner.world_size=4", "learner.ranks_per_node=2")[name]
    own = {variable.name: VALUES[variable.name] for variable in role.variables}
    arguments = parse(filled(role.command, own)[1:])
    config = load_config(CONFIG, arguments.overrides)
    assert config.weights.host == "n2"
    assert {secret.file for secret in role.secrets} >= {"secrets/ca.pem", "secrets/token"}
    assert str(config.security.token_file) == "secrets/token"
    if name == LEARNER:
        assert (arguments.node_rank, arguments.master) == (1, "n1:29500")
        assert config.controller.address == "n1:7070"
    else:
        assert (arguments.controller, arguments.server_id) == ("n1:7070", "server-3")
        # The key of the controller's certificate stays with the learner.
        assert config.security.tls_key is None


@pytest.mark.parametrize("name", [LEARNER, ROLLOUT_SERVER])
def test_a_probe_knows_no_more_than_its_role(name: str) -> None:
    role = roles()[name]
    own = {variable.name: VALUES[variable.name] for variable in role.variables}
    assert filled(role.health.command, own)


def test_the_settings_size_the_roles() -> None:
    asked = ("learner.world_size=4", "learner.ranks_per_node=2", "rollout_server.count=3")
    found = roles(*asked, "rollout_server.tensor_parallel_size=2", on_gpus=True)
    learner, server = found[LEARNER], found[ROLLOUT_SERVER]
    assert (learner.kind, learner.count.usual, learner.gpus) == ("gang", 2, 2)
    assert learner.program("trainer-rank").count == 2
    assert (server.kind, server.count.usual, server.gpus) == ("elastic", 3, 2)
    assert (server.count.least, server.count.most) == (1, None)
    assert roles()[LEARNER].gpus == 0


def test_one_machine_starts_all_that_the_instances_start_together() -> None:
    config = config_of("learner.world_size=4", "learner.ranks_per_node=2")
    nodes = [learner_node(config, rank) for rank in (0, 1)]
    assert [list(node.ranks) for node in nodes] == [[0, 1], [2, 3]]
    assert [node.has_controller for node in nodes] == [True, False]
    whole = whole_run(config)
    assert list(whole.ranks) == [0, 1, 2, 3]
    assert whole.servers == config.rollout_server.count
    with pytest.raises(ConfigError, match="--node-rank must be 0 to 1, got 2"):
        learner_node(config, 2)


def test_files_that_the_settings_name_go_before_the_usual_ones() -> None:
    found = roles("security.token_file=/etc/token")[ROLLOUT_SERVER]
    assert "security.token_file=/etc/token" in found.command


def test_a_queue_that_nobody_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue\.redis_url must be the address of a server"):
        roles('queue.kind="redis"')


def test_the_published_schema_is_that_of_the_roles() -> None:
    written = json.loads(SCHEMA.read_text())
    assert written == Roles.model_json_schema(), (
        "slipstream roles --schema > docs/roles.schema.json"
    )


def test_roles_are_printed_as_the_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roles", str(CONFIG), "rollout_server.count=2"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert Roles.model_validate(printed)[ROLLOUT_SERVER].count.usual == 2


def test_slurm_gets_a_job_and_an_array() -> None:
    found = files("learner.world_size=4", "learner.ranks_per_node=2", "rollout_server.count=8")
    assert "#SBATCH --nodes=2\n" in found["learner.sbatch"]
    assert "#SBATCH --array=0-7\n" in found["rollout-server.sbatch"]
    for text in found.values():
        assert "#SBATCH --requeue\n" in text
        assert "--gpus" not in text
        # A setting of Slurm behind the first command would be passed over.
        head, _, body = text.partition("\n\n")
        assert "#SBATCH" not in body
        assert head.startswith("#!/bin/bash\n")


def test_slurm_is_asked_for_gpus() -> None:
    found = files("rollout_server.tensor_parallel_size=4", on_gpus=True)
    assert "#SBATCH --gpus-per-node=1\n" in found["learner.sbatch"]
    assert "#SBATCH --gpus-per-node=4\n" in found["rollout-server.sbatch"]


@pytest.mark.process
def test_the_shell_reads_the_files_of_slurm() -> None:
    for text in files('run.name="a"').values():
        subprocess.run(["bash", "-n"], input=text.encode(), check=True)


@pytest.mark.process
@pytest.mark.parametrize("word", ["plain=1", 'run.name="two words"', "$(no)`no`", "a\\b'c", "$A"])
def test_the_shell_reads_a_word_as_it_was(word: str) -> None:
    read = subprocess.run(["bash", "-c", f"printf %s {shell_word(word)}"], capture_output=True)
    assert read.stdout.decode() == word
    assert read.returncode == 0


@pytest.fixture
def rollout_job(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rollout job whose server runs, beside stand-ins for Slurm and for the server's command.

    squeue says what is in the file `jobs`, and fails without it; each call adds to `calls`.
    """
    programs = {
        "squeue": "echo >> calls; cat jobs",
        "slipstream": 'echo "$@" >> runs/started; exec sleep 600',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "jobs").write_text("1\n")
    script = slurm_files(roles(), "slurm", controller_port=7070, master_port=29500, watch_s=0.05)[
        "rollout-server.sbatch"
    ]
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "runs" / "quickstart" / "controller.address").write_text(address)
        environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        job = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL
        )
        try:
            until((tmp_path / "runs" / "started").exists)
            yield job
        finally:
            job.terminate()
            job.wait()


def until(is_there: Any) -> None:
    for _ in poll(60, every_s=0.02):
        if is_there():
            return
    raise TimeoutError


@pytest.mark.process
def test_a_server_that_never_joined_ends_after_the_learners_job(tmp_path, rollout_job):
    (tmp_path / "jobs").write_text("")
    assert rollout_job.wait(60) == 0


@pytest.mark.process
def test_a_rollout_job_stays_while_slurm_does_not_answer(tmp_path, rollout_job):
    (tmp_path / "jobs").unlink()
    calls = tmp_path / "calls"
    asked = calls.stat().st_size
    until(lambda: calls.stat().st_size >= asked + 3)
    assert rollout_job.poll() is None


@pytest.mark.process
def test_a_server_follows_the_learner_to_another_node(tmp_path, rollout_job):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (tmp_path / "runs" / "quickstart" / "controller.address").write_text(address)
        until(lambda: f"--controller={address} " in (tmp_path / "runs" / "started").read_text())
    assert rollout_job.poll() is None


def test_ray_gets_a_program_of_the_roles() -> None:
    asked = ("learner.world_size=4", "learner.ranks_per_node=2", "rollout_server.count=3")
    printed = roles(*asked, on_gpus=True)
    text = ray_program(printed, "ray/run.py", controller_port=7070, master_port=29500)
    values = {
        target.id: statement.value
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    assert ast.literal_eval(values["LEARNER"]) == printed[LEARNER].command
    *server, patience = ast.literal_eval(values["ROLLOUT_SERVER"])
    assert server == printed[ROLLOUT_SERVER].command
    # Longer than a learner takes to prove an algorithm before it listens.
    assert patience == "--connect-timeout-s=3600"
    assert ast.literal_eval(values["LEARNER_NEEDS"]) == {"CPU": 3, "GPU": 2}
    # Nodes of a gang lie on machines of their own.
    assert 'strategy="STRICT_SPREAD"' in text


def test_files_that_were_edited_are_kept(tmp_path: Path) -> None:
    write_files({"a": "1", "b": "2"}, tmp_path)
    write_files({"a": "1", "b": "2"}, tmp_path)
    (tmp_path / "b").write_text("edited")
    with pytest.raises(ConfigError, match="b exists and differs: remove it, or name another --out"):
        write_files({"new": "3", "b": "2"}, tmp_path)
    assert not (tmp_path / "new").exists()
