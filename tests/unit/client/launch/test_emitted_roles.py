"""The roles of a run, and the files of schedulers that are made of them."""

from __future__ import annotations

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
import yaml
from slipstream.client.cli import main, parse
from slipstream.client.launch.emit_kubernetes import LONGEST_NAME, Pods
from slipstream.client.launch.emit_scripts import ray_program, slurm_files
from slipstream.client.launch.emit_skypilot import skypilot_group
from slipstream.client.launch.print_roles import write_files
from slipstream.client.launch.roles import (
    LEARNER,
    ROLLOUT_SERVER,
    Roles,
    Site,
    learner_node,
    roles_of,
)
from slipstream.client.launch.shipped_code import ShippedCode, read_code
from slipstream.client.launch.template import shell_word
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.rigs.completed import completed
from support.rigs.namespaces import poll

ROOT = Path(__file__).parents[4]
CONFIG = ROOT / "deploy" / "configs" / "quickstart.toml"
SCHEMA = ROOT / "docs" / "roles.schema.json"
VALUES = {
    "CONTROLLER_ADDRESS": "n1:7070",
    "MASTER_ADDRESS": "n1:29500",
    "NODE_RANK": "1",
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
    assert [program.count for program in learner.programs] == [1, 2]
    assert (server.kind, server.count.usual, server.gpus) == ("elastic", 3, 2)
    assert (server.count.least, server.count.most) == (1, None)
    assert roles()[LEARNER].gpus == 0


def test_one_machine_starts_all_that_the_instances_start_together() -> None:
    config = config_of(*GANG, 'learner.master="n0:29500"')
    nodes = [learner_node(config, rank) for rank in (0, 1)]
    assert [list(node.ranks) for node in nodes] == [[0, 1], [2, 3]]
    assert [node.has_controller for node in nodes] == [True, False]
    with pytest.raises(ConfigError, match="--node-rank must be 0 to 1, got 2"):
        learner_node(config, 2)
    with pytest.raises(ConfigError, match="learner.master needs a port that all nodes know, got 0"):
        learner_node(config_of(*GANG), 0)


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


GANG = ("learner.world_size=4", "learner.ranks_per_node=2")


def pods(*overrides: str, code: dict[str, str] | None = None, on_gpus: bool = False) -> Pods:
    return Pods(CONFIG, overrides, ShippedCode(code or {}), on_gpus=on_gpus)


def pod_specs(*overrides: str, on_gpus: bool = False) -> dict[str, dict[str, Any]]:
    """The pods' specifications by the names of their roles."""
    specs = pod_specs_of(pods(*overrides, on_gpus=on_gpus).files("kubernetes"))
    return {spec["containers"][0]["name"]: spec for spec in specs}


def pod_specs_of(files: dict[str, str]) -> list[dict[str, Any]]:
    """The pods' specifications in written files."""
    jobs = yaml.safe_load(files["learner.yaml"])["spec"]["replicatedJobs"]
    server, _ = yaml.safe_load_all(files["rollout-server.yaml"])
    specs = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    return [*specs, server["spec"]["template"]["spec"]]


def test_each_pod_gets_the_secrets_of_its_role_alone() -> None:
    table = yaml.safe_load(pods(*GANG).files("k")["kustomization.yaml"])
    secrets = {entry["name"]: entry["files"] for entry in table["secretGenerator"]}
    ca, own = "secrets/ca.pem", ["secrets/server.pem", "secrets/server.key"]
    assert secrets == {
        "quickstart-learner": [ca, "secrets/token", *own],
        "quickstart-learner-node": [ca, "token=secrets/trainer_token"],
        "quickstart-rollout-server": [ca, "token=secrets/rollout_server_token"],
    }
    for name, spec in pod_specs(*GANG).items():
        named = {volume["name"]: volume for volume in spec["volumes"]}
        assert named["secrets"]["secret"]["secretName"] == f"quickstart-{name}"


@pytest.mark.parametrize("name", ["learner", "learner-node", "rollout-server"])
def test_the_command_of_a_pod_is_one_of_ours(name: str) -> None:
    (container,) = pod_specs(*GANG)[name]["containers"]
    placed = {"NODE_RANK": "1", "HOST_ADDRESS": "10.0.0.2", "SERVER_ID": "pod"}
    own = {each["name"]: each.get("value") or placed[each["name"]] for each in container["env"]}
    words = [
        re.sub(r"\$\((\w+)\)", lambda found: own[found[1]], word) for word in container["command"]
    ]
    arguments = parse(words[1:])
    config = load_config(CONFIG, arguments.overrides)
    assert (str(config.run.dir), str(config.model.path)) == ("/runs", "/models/tiny")
    host = "quickstart-learner-0-0.quickstart"
    if name == "rollout-server":
        assert (arguments.controller, arguments.server_id) == (f"{host}:7070", "pod")
        assert arguments.connect_timeout_s == 3600
    else:
        assert (arguments.node_rank, arguments.master) == (1, f"{host}:29500")
        assert config.controller.address == f"{host}:7070"


def test_a_word_that_looks_like_a_variable_of_the_kubelet_stays_itself() -> None:
    (container,) = pod_specs('run.dir="$(HOME)"')["learner"]["containers"]
    assert 'run.dir="$$(HOME)"' in container["command"]


@pytest.mark.process
def test_probes_have_their_variables_from_a_shell() -> None:
    (container,) = pod_specs()["rollout-server"]["containers"]
    shell, option, script = container["livenessProbe"]["exec"]["command"]
    shown = completed(
        [shell, option, script.replace("exec ", "echo ", 1)],
        env={"CONTROLLER_ADDRESS": "a b:1", "SERVER_ID": "$(x)"},
        check=True,
    )
    assert "--controller=a b:1 " in shown.stdout
    assert shown.stdout.endswith(" --server-id=$(x)\n")


def test_a_pod_is_a_restricted_one() -> None:
    for spec in pod_specs(*GANG).values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
        assert {"/tmp", "/cache", "/dev/shm", "/runs"} <= mounts


def test_the_settings_size_the_pods() -> None:
    specs = pod_specs(*GANG, "rollout_server.tensor_parallel_size=4", on_gpus=True)
    gpus = {
        name: spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for name, spec in specs.items()
    }
    assert gpus == {"learner": 2, "learner-node": 2, "rollout-server": 4}
    assert "limits" not in pod_specs()["learner"]["containers"][0]["resources"]
    files = pods(*GANG, "rollout_server.count=3").files("k")
    assert "ReadWriteOnce" not in files["claims.yaml"]
    server, _ = yaml.safe_load_all(files["rollout-server.yaml"])
    assert server["spec"]["replicas"] == 3


def test_a_model_of_the_hub_needs_no_volume() -> None:
    settings = f'model.path="owner/name@{"a" * 40}"'
    for spec in pod_specs(settings).values():
        assert "models" not in {volume["name"] for volume in spec["volumes"]}
        assert not any("/models/" in word for word in spec["containers"][0]["command"])


def test_a_queue_is_there_if_the_settings_have_one() -> None:
    assert "queue.yaml" not in pods().files("k")
    found = pods('queue.kind="redis"')
    files = found.files("k")
    service, queue = yaml.safe_load_all(files["queue.yaml"])
    assert service["metadata"]["name"] == queue["spec"]["serviceName"] == "quickstart-queue"
    secrets = yaml.safe_load(files["kustomization.yaml"])["secretGenerator"]
    by_name = {entry["name"]: set(entry["files"]) for entry in secrets}
    assert "secrets/redis_rollout_password" in by_name["quickstart-rollout-server"]
    assert "secrets/redis_rollout_password" not in by_name["quickstart-queue"]
    assert found.config.queue.redis_url is not None
    own = 'queue.redis_url="redis://elsewhere:6379/0"'
    assert "queue.yaml" not in pods('queue.kind="redis"', own).files("k")


def test_only_the_first_pod_of_the_learner_answers_prometheus_from_elsewhere() -> None:
    assert not any(name.startswith(("scaling", "monitor")) for name in pods().files("k"))
    asked = (*GANG, 'tracking.prometheus="10.0.0.1:9400"')
    files = pods(*asked).files("k")
    at_home = 'tracking.prometheus="127.0.0.1:9400"'
    elsewhere = 'tracking.prometheus="$(HOST_ADDRESS):9400"'
    first, *others = pod_specs_of(files)
    words = first["containers"][0]["command"]
    assert words.index(at_home) < words.index(elsewhere)
    assert {port["containerPort"] for port in first["containers"][0]["ports"]} == {9400, 9401}
    for spec in others:
        assert at_home in spec["containers"][0]["command"]
        assert elsewhere not in spec["containers"][0]["command"]
    secrets = yaml.safe_load(files["kustomization.yaml"])["secretGenerator"]
    holders = [each["name"] for each in secrets if "secrets/metrics_token" in each["files"]]
    assert holders == ["quickstart-learner"]
    policy = yaml.safe_load(files["network.yaml"])
    assert policy["spec"]["ingress"][1] == {"ports": [{"port": 9400, "endPort": 9401}]}
    scaled = yaml.safe_load(files["scaling/scaledobject.yaml"])["spec"]
    assert scaled["scaleTargetRef"]["name"] == "quickstart-rollout-server"


@pytest.mark.parametrize("name", ["Upper", "under_score", "9first", "last-", "a.b", "a" * 32])
def test_a_run_that_can_be_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name must be a name in Kubernetes: .*got '"):
        pods(f"run.name={name}")


def test_the_longest_name_fits() -> None:
    jobs = yaml.safe_load(pods(f"run.name={'a' * 31}", *GANG).files("k")["learner.yaml"])
    last = jobs["spec"]["replicatedJobs"][-1]["name"]
    assert len(f"{jobs['metadata']['name']}-{last}-0-0-abcde") <= LONGEST_NAME


def test_code_goes_into_a_config_map_with_its_folders(tmp_path: Path) -> None:
    (tmp_path / "mine" / "__pycache__").mkdir(parents=True)
    for name in ("task.py", "mine/words.py", "mine/__pycache__/words.pyc"):
        (tmp_path / name).write_text(f"# {name}\n")
    shipped = read_code(tmp_path, tmp_path / "other", most_bytes=100)
    assert {*shipped.files} == {"task.py", "mine/words.py"}
    found = Pods(CONFIG, (), shipped, on_gpus=False).files("k")
    assert found["code/mine/words.py"] == "# mine/words.py\n"
    table = yaml.safe_load(found["kustomization.yaml"])["configMapGenerator"]
    keys = {key: file for key, _, file in (e.partition("=") for e in table[-1]["files"])}
    for spec in pod_specs_of(found):
        (volume,) = [each for each in spec["volumes"] if each["name"] == "code"]
        placed = {keys[item["key"]]: item["path"] for item in volume["configMap"]["items"]}
        assert placed == {"code/task.py": "task.py", "code/mine/words.py": "mine/words.py"}
    with pytest.raises(
        ConfigError, match=r"makes a ConfigMap of 64 bytes, at most 20 can be applied"
    ):
        read_code(tmp_path, tmp_path, most_bytes=20)
    (tmp_path / "image.png").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"image\.png is no text; put it into a volume"):
        read_code(tmp_path, tmp_path, most_bytes=None)
    with pytest.raises(ConfigError, match="none: no such folder"):
        read_code(tmp_path / "none", tmp_path, most_bytes=None)


@pytest.mark.parametrize("name", ["two words.py", "a=b.py", "ä.txt", "a:b"])
def test_a_file_that_can_be_no_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"a file in a ConfigMap has a name of letters, .*got '"):
        pods(code={name: ""})


def test_code_that_lies_where_it_is_shipped_from_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "task.py").touch()
    assert read_code(tmp_path, tmp_path, most_bytes=None).in_place


def test_the_command_names_what_it_leaves_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.py").touch()
    (tmp_path / "mine" / "mine.py").touch()
    command = ["roles", str(CONFIG), "environments.0.reference=mine:Task"]
    for target, verb in (("kubernetes", "kubectl apply --kustomize"), ("skypilot", "sky jobs")):
        assert main([*command, "--for", target]) == 0
        said = capsys.readouterr().out
        assert "! mine is in this folder alone: --code FOLDER ships a folder that has it" in said
        assert verb in said
        assert main([*command, "--for", target, "--code", "mine", "--out", f"o-{target}"]) == 0
        assert "!" not in capsys.readouterr().out
    assert (tmp_path / "o-kubernetes" / "code" / "mine.py").is_file()
    assert main([*command, "--for", "slurm", "--code", "mine"]) == 2
    assert "--code is for kubernetes and skypilot" in capsys.readouterr().err
    assert main([*command, "--for", "compose", "--gpus"]) == 2
    assert "--gpus is not for compose: add" in capsys.readouterr().err


def skypilot(*overrides: str, on_gpus: bool = False) -> list[dict[str, Any]]:
    files, _ = skypilot_group(CONFIG, overrides, Path("mine"), Path("skypilot"), on_gpus=on_gpus)
    return list(yaml.safe_load_all(files["run.yaml"]))


def test_skypilot_gets_a_task_for_the_learner_and_one_for_each_server() -> None:
    header, learner, *servers = skypilot(*GANG, "rollout_server.count=3", on_gpus=True)
    assert (header["execution"], header["primary_tasks"]) == ("parallel", ["learner"])
    assert (learner["num_nodes"], learner["resources"]["use_spot"]) == (2, False)
    assert learner["resources"]["accelerators"] == {"H100": 2, "H200": 2}
    assert [each["name"] for each in servers] == [f"rollout-server-{n}" for n in range(3)]
    for each in servers:
        assert (each["num_nodes"], each["resources"]["use_spot"]) == (1, True)
        # The key of the controller's certificate stays with the learner.
        assert not any("server.key" in name for name in each["file_mounts"])
        token = each["file_mounts"]["~/slipstream/secrets/token"]
        assert token == "secrets/rollout_server_token"
        assert each["workdir"] == "mine"


@pytest.mark.process
def test_the_shell_of_a_task_calls_a_command_of_ours() -> None:
    _, learner, server = skypilot(*GANG)
    environ = {
        "HOME": "/home/me",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": "/usr/bin:/bin",
    }
    for task in (learner, server):
        script = task["run"].replace("exec slipstream", "printf '%s\\n'")
        shown = completed(["bash", "-c", script], env=environ, check=True)
        arguments = parse(shown.stdout.splitlines())
        config = load_config(CONFIG, arguments.overrides)
        assert str(config.security.token_file) == "/home/me/slipstream/secrets/token"
        assert str(arguments.path) == "/home/me/slipstream/config.toml"
        if task is learner:
            assert (arguments.node_rank, arguments.master) == (1, "learner-0.quickstart:29500")
        else:
            assert arguments.controller == "learner-0.quickstart:7070"


def test_a_run_that_can_be_no_name_of_skypilot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.name must be a name in SkyPilot: .*got 'a\.b'"):
        skypilot('run.name="a.b"')


def test_models_travel_under_names_of_their_own() -> None:
    reference = ('reference.path="other/frozen"', "algorithm.kl.coefficient=0.1")
    _, learner, _ = skypilot(*reference)
    assert learner["file_mounts"]["~/slipstream/models/tiny"] == "models/tiny"
    assert learner["file_mounts"]["~/slipstream/models/frozen"] == "other/frozen"
    assert '"reference.path=\\"${HOME}/slipstream/models/frozen\\""' in learner["run"]
    (container,) = pod_specs(*reference)["learner"]["containers"]
    assert 'reference.path="/models/frozen"' in container["command"]
    for make in (pods, skypilot):
        with pytest.raises(ConfigError, match=r"\.path must end with a name of its own, got"):
            make('reference.path="other/tiny"', "algorithm.kl.coefficient=0.1")
