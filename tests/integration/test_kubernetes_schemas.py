"""Helm renders the chart, and Kubernetes' schemas and our command line read the result."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from slipstream.client.cli import parse
from slipstream.core.configuration.config_file import load_config
from slipstream.extensions.redis.connection import REQUIRED_SETTINGS
from support.rigs import helm_chart, tools
from support.rigs.completed import completed
from support.rigs.helm_chart import ChartRefused, rendered, resources, secrets_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy/configs/quickstart.toml"
CHECK = ROOT / "tests" / "support" / "rigs" / "kubernetes_schemas.py"
PYTHON = helm_chart.TOOLS / "bin" / "python"
# The oldest, a middle and the newest one that the package has.
VERSIONS = ("1.27", "1.32", "1.37")
KINDS = {
    "JobSet",
    "Job",
    "Deployment",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ConfigMap",
}
KINDS |= {"Secret", "PersistentVolumeClaim"}
METRICS = ("--set=metrics.port=9400",)
QUEUE = ("--set=valkey.enabled=true",)
OPERATORS = (*METRICS, "--set=metrics.monitor=true", "--set=scaling.enabled=true")
GANG = (
    "--set=learner.nodes=4",
    "--set-json=learner.resources.limits.nvidia\\.com/gpu=2",
    "--set-json=rolloutServer.resources.limits.nvidia\\.com/gpu=1",
    '--set-json=learner.tolerations=[{"key":"nvidia.com/gpu","operator":"Exists"}]',
    '--set-json=imagePullSecrets=[{"name":"registry"}]',
    "--set=kueue=default",
    "--set=settings[0]=learner.world_size=8",
    "--set=settings[1]=learner.ranks_per_node=2",
)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(helm_chart.MISSING is not None, reason=str(helm_chart.MISSING)),
]
needs_schemas = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no kubernetes-validate here: {tools.HOW}"
)
# No package has the definitions of JobSet, KEDA and Prometheus's operator.
CRDS = helm_chart.TOOLS / "crds"
CUSTOM = "CRD" if CRDS.exists() else "no schema"
needs_crds = pytest.mark.skipif(
    not CRDS.exists(), reason=f"put the definitions of custom resources in {CRDS}"
)


def judged(manifests: str) -> list[dict[str, str | None]]:
    """What the schemas say to each resource."""
    command: Sequence[Path | str] = [PYTHON, CHECK, CRDS, *VERSIONS]
    ended = completed(command, input=manifests, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@needs_schemas
@pytest.mark.parametrize(
    ("options", "more"),
    [
        pytest.param((), set(), id="smallest"),
        pytest.param(GANG, set(), id="several"),
        pytest.param(QUEUE, {"StatefulSet", "Service"}, id="queue"),
        pytest.param(
            OPERATORS, {"ScaledObject", "PodMonitor", "PrometheusRule"}, id="operators"
        ),
    ],
)
def test_the_schemas_of_three_versions_and_of_custom_resources_take_it(
    options, more, tmp_path
):
    secrets = secrets_of("first", tmp_path, "learner")
    verdicts = judged(f"{rendered('first', *options)}\n---\n{secrets}")
    assert [verdict for verdict in verdicts if verdict["wrong"]] == []
    assert {verdict["kind"] for verdict in verdicts} == KINDS | more
    assert {verdict["version"] for verdict in verdicts} == {CUSTOM, *VERSIONS}


@needs_schemas
@pytest.mark.parametrize(
    ("right", "wrong", "kind"),
    [
        ("terminationGracePeriodSeconds", "gracePeriod", "Deployment"),
        ("backoffLimit", "backOffs", "Job"),
        pytest.param("failurePolicy", "failurePolicies", "JobSet", marks=needs_crds),
        pytest.param("pollingInterval", "pollEvery", "ScaledObject", marks=needs_crds),
    ],
)
def test_the_schemas_refuse_a_field_that_is_wrong(
    right: str, wrong: str, kind: str
) -> None:
    manifests = rendered("first", *OPERATORS)
    assert right in manifests
    verdicts = judged(manifests.replace(right, wrong))
    assert kind in {verdict["kind"] for verdict in verdicts if verdict["wrong"]}


def found(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's resources by kind and name."""
    return {
        (resource["kind"], resource["metadata"]["name"]): resource
        for resource in resources(rendered("first", *options))
    }


def pods(*options: str) -> dict[str, dict[str, Any]]:
    """The pods' specifications by the names of their containers."""
    of = found(*options)
    jobs = of["JobSet", "first"]["spec"]["replicatedJobs"]
    specs = [job["template"]["spec"]["template"]["spec"] for job in jobs]
    specs.append(of["Deployment", "first-rollout-server"]["spec"]["template"]["spec"])
    if ("StatefulSet", "first-queue") in of:
        specs.append(of["StatefulSet", "first-queue"]["spec"]["template"]["spec"])
    return {spec["containers"][0]["name"]: spec for spec in specs}


def command_of(spec: dict[str, Any]) -> Any:
    """A pod's command as our command line reads it, with the values of one pod."""
    placed = {"NODE_RANK": "1", "HOST_ADDRESS": "10.0.0.2", "SERVER_ID": "pod"}
    (container,) = spec["containers"]
    settings = {
        variable["name"]: variable.get("value") or placed[variable["name"]]
        for variable in container["env"]
    }
    words = [
        re.sub(r"\$\((\w+)\)", lambda name: settings[name[1]], word)
        for word in container["command"]
    ]
    assert words[0] == "slipstream"
    return parse(words[1:])


@pytest.mark.parametrize("name", ["learner", "learner-node", "rollout-server"])
def test_the_command_of_a_pod_is_one_of_ours(name: str) -> None:
    arguments = command_of(pods(*GANG, *QUEUE, *METRICS)[name])
    config = load_config(CONFIG, arguments.overrides)
    assert (config.run.name, str(config.run.dir)) == ("first", "/runs")
    assert config.queue.redis_url is not None
    assert config.learner.world_size == 8
    host = "first-learner-0-0.first"
    is_learner = name != "rollout-server"
    if is_learner:
        assert (arguments.node_rank, arguments.master) == (1, f"{host}:29500")
        assert config.controller.address == f"{host}:7070"
    else:
        assert (arguments.controller, arguments.server_id) == (f"{host}:7070", "pod")
    # The queue may need its image and volume first, and a server the learner.
    assert arguments.connect_timeout_s == (None if name == "learner-node" else 3600)
    # The key of the controller's certificate stays with its pod, as does a user of the queue.
    assert (config.security.tls_key is not None) == (name == "learner")
    ends = (
        config.queue.controller is not None,
        config.queue.rollout_server is not None,
    )
    assert ends == (name == "learner", name == "rollout-server")
    elsewhere = name == "learner"
    assert config.tracking.prometheus == (
        "10.0.0.2:9400" if elsewhere else "127.0.0.1:9400"
    )


def test_each_pod_reads_the_secrets_that_its_command_names(tmp_path: Path) -> None:
    secrets_made = resources(secrets_of("first", tmp_path, "learner"))
    data = {secret["metadata"]["name"]: secret["data"] for secret in secrets_made}
    assert data["first-learner-node"].keys() == {"ca.pem", "token"}
    tokens = {name: data[f"first-{name}"]["token"] for name in pods(*GANG)}
    assert len({*tokens.values()}) == 3
    for name, spec in pods(*GANG, *QUEUE, *METRICS).items():
        (secret,) = [
            volume["secret"] for volume in spec["volumes"] if "secret" in volume
        ]
        assert secret["secretName"] == f"first-{name}"
        words = json.dumps(spec)
        file_names = {*re.findall(r"/run/slipstream/([\w.]+)", words)}
        assert file_names == {*data[secret["secretName"]]}


def test_a_pod_is_a_restricted_one_with_bounded_memory() -> None:
    for spec in pods(*GANG, *QUEUE).values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            context = container["securityContext"]
            needs = container["resources"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert needs["requests"].keys() == {"cpu", "memory"}
            assert "memory" in needs["limits"]
        for volume in spec["volumes"]:
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert volume["emptyDir"]["sizeLimit"]


def test_the_values_size_the_pods() -> None:
    of = found(*GANG)
    first, further = of["JobSet", "first"]["spec"]["replicatedJobs"]
    assert (first["replicas"], further["replicas"]) == (1, 3)
    gpus = {
        name: spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for name, spec in pods(*GANG).items()
    }
    assert gpus == {"learner": 2, "learner-node": 2, "rollout-server": 1}
    assert pods(*GANG)["learner"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    for name in ("JobSet", "first"), ("Deployment", "first-rollout-server"):
        assert of[name]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"


def test_every_resource_is_in_the_releases_namespace_and_says_what_it_is() -> None:
    of = found("--namespace=research", *GANG, *QUEUE, *OPERATORS)
    assert {manifest["metadata"]["namespace"] for manifest in of.values()} == {
        "research"
    }
    templates = [of[kind]["spec"]["template"] for kind in of if kind[0] == "Deployment"]
    templates += [
        job["template"]["spec"]["template"]
        for job in of["JobSet", "first"]["spec"]["replicatedJobs"]
    ]
    labels = [
        template["metadata"]["labels"]["app.kubernetes.io/component"]
        for template in templates
    ]
    assert labels == ["rollout-server", "learner", "learner"]


def test_a_volume_that_is_named_takes_the_place_of_an_empty_one() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "models"}}
    pods_by_name = pods(f"--set-json=models={json.dumps(claim)}")
    for of, other in zip(pods().values(), pods_by_name.values(), strict=True):
        before, after = (
            {v["name"]: v for v in spec["volumes"]} for spec in (of, other)
        )
        assert before["models"] == {"name": "models", "emptyDir": {}}
        assert after["models"] == {"name": "models", **claim}
        assert after["code"] == {"name": "code", "emptyDir": {}}


def test_the_queue_asks_itself_whether_it_is_ready_and_is_durable() -> None:
    (queue,) = pods(*QUEUE)["queue"]["containers"]
    # The learner's service has no address before it is ready.
    (script,) = queue["readinessProbe"]["exec"]["command"][2:]
    assert " -h 127.0.0.1 -p 6380 " in script
    words = queue["command"][1:]
    settings = {
        name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert REQUIRED_SETTINGS.items() <= settings.items()
    assert settings["port"] == "0"


def test_prometheus_reads_the_ports_that_are_open_and_gets_all_alerts() -> None:
    of = found(*OPERATORS)
    (learner,) = pods(*OPERATORS)["learner"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in learner["ports"]}
    assert ports == {"controller": 9400}
    endpoints = of["PodMonitor", "first"]["spec"]["podMetricsEndpoints"]
    assert {endpoint["port"] for endpoint in endpoints} == {*ports}
    rule = of["NetworkPolicy", "first"]["spec"]["ingress"][1]
    assert rule == {"ports": [{"port": 9400}]}
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert of["PrometheusRule", "first"]["spec"] == alerts
    assert "replicas" not in of["Deployment", "first-rollout-server"]["spec"]


@pytest.mark.parametrize("name", ["under-", "9first", "a.b", "a" * 32])
def test_a_run_whose_pods_could_have_no_name_is_refused(name: str) -> None:
    with pytest.raises(ChartRefused, match=r"release.* name"):
        rendered(name)


def test_a_chart_without_settings_or_without_metrics_to_read_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.toml").touch()
    with pytest.raises(ChartRefused, match="--set-file config=run.toml"):
        rendered("first", config=tmp_path / "empty.toml")
    with pytest.raises(ChartRefused, match=r"need metrics\.port"):
        rendered("first", "--set=scaling.enabled=true")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("learner.node=2", "additional properties 'node' not allowed"),
        ("rolloutserver.count=2", "additional properties 'rolloutserver' not allowed"),
        ("learner.nodes=two", "at '/learner/nodes': got string, want integer"),
        ("settings=run.steps=5", "at '/settings': got string, want array"),
        ("code=first-code", "at '/code': got string, want object"),
        ("metrics.port=99999", "at '/metrics/port': maximum"),
    ],
)
def test_a_value_of_another_name_or_kind_is_refused(value: str, why: str) -> None:
    with pytest.raises(ChartRefused, match=re.escape(why)):
        rendered("first", f"--set={value}")


RDMA = (
    "--set=learner.podSpec.hostNetwork=true",
    "--set=learner.podSpec.priorityClassName=high",
    '--set-json=learner.capabilities=["IPC_LOCK"]',
    "--set=learner.cache.hostPath.path=/var/cache/slipstream",
    '--set-json=learner.volumes=[{"name":"scratch","emptyDir":{}}]',
    '--set-json=learner.volumeMounts=[{"name":"scratch","mountPath":"/scratch"}]',
    '--set-json=learner.podAnnotations={"k8s.v1.cni.cncf.io/networks":"rdma"}',
    "--set=learner.exclusiveTopology=rack",
)


def test_a_role_may_have_further_fields_of_a_pod_capabilities_and_volumes() -> None:
    spec = pods(*RDMA)["learner"]
    (container,) = spec["containers"]
    assert spec["hostNetwork"]
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert spec["priorityClassName"] == "high"
    assert container["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["IPC_LOCK"],
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["cache"]["hostPath"] == {"path": "/var/cache/slipstream"}
    assert "scratch" in volumes
    assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
    job_set = found(*RDMA)["JobSet", "first"]
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"}
    assert job_set["metadata"]["annotations"] == exclusive
    template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "k8s.v1.cni.cncf.io/networks": "rdma"
    }
    # The other role is as it was.
    assert pods(*RDMA)["rollout-server"] == pods()["rollout-server"]


@needs_schemas
def test_the_schemas_take_further_fields_of_a_pod() -> None:
    verdicts = judged(rendered("first", *RDMA))
    assert [verdict for verdict in verdicts if verdict["wrong"]] == []


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            'learner.podSpec={"containers":[]}',
            "learner.podSpec.containers is set by the chart",
        ),
        (
            'rolloutServer.podSpec={"tolerations":[]}',
            "rolloutServer.podSpec.tolerations is set",
        ),
        (
            'learner.volumes=[{"name":"runs"}]',
            "learner.volumes has runs, which is the name of",
        ),
        ("learner.affinity={}", "affinity"),
    ],
)
def test_a_field_that_the_chart_sets_is_refused(option: str, said: str) -> None:
    with pytest.raises(ChartRefused, match=re.escape(said)):
        rendered("first", f"--set-json={option}")


def test_a_copied_chart_is_whole(tmp_path) -> None:
    copy = tmp_path / "chart"
    completed(["cp", "-r", helm_chart.CHART, copy], check=True)
    command = [
        str(helm_chart.TOOLS / "helm"),
        "template",
        "first",
        str(copy),
        *OPERATORS,
    ]
    done = completed([*command, f"--set-file=config={CONFIG}"])
    assert done.returncode == 0, done.stderr
    assert done.stdout == rendered("first", *OPERATORS)
