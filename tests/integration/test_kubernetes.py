"""The quickstart in pods, from the Helm chart.

Pods are made of namespaces (`kubernetes_pods`): two of the learner, two rollout servers, the queue.
One server is deleted, one killed, a node of the learner is drained; the run goes on to its end.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.rigs import helm_chart, namespaces
from support.rigs.completed import completed
from support.rigs.kubernetes_pods import Pod, Pods, wait_for
from support.rigs.namespaces import Mount, Network
from support.rigs.run_processes import check_finished

MISSING = namespaces.missing() or helm_chart.MISSING
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

ROOT = Path(__file__).parents[2]
USER = 1000
STEPS = 150
LIMIT_S = 900.0
SERVERS = "quickstart-rollout-server"
RUN = "quickstart"
SETTINGS = (
    "learner.world_size=2",
    "learner.ranks_per_node=1",
    'model.path="/models/tiny"',
    # A busy machine takes minutes to load an engine.
    "controller.stall_timeout_s=1800",
    "environments.0.reference=letters:Letters",
    "evaluations.0.reference=letters:Letters",
)
VALUES = {
    "settings": SETTINGS,
    "learner": {"nodes": 2},
    "rolloutServer": {"count": 2},
    "valkey": {"enabled": True},
    "metrics": {"port": 9400},
    "models": {"persistentVolumeClaim": {"claimName": "models"}},
    "code": {"configMap": {"name": "quickstart-code"}},
}
# The user's own environment, which imports a module of its own and reads a file beside it.
CODE = {
    "letters.py": """
from pathlib import Path

from slipstream.environments.echo import Echo

from words import NAME

assert (Path(__file__).parent / "note.txt").read_text() == NAME


class Letters(Echo):
    pass
""",
    "words.py": 'NAME = "letters"\n',
    "note.txt": "letters",
}
# The work of Prometheus, by the name in the PodMonitor.
ASK_METRICS = """
import os, socket, ssl
context = ssl.create_default_context(cafile="/run/slipstream/ca.pem")
token = open("/run/slipstream/metrics_token").read().strip()
host = os.environ["CONTROLLER_ADDRESS"].partition(":")[0]
with socket.create_connection((os.environ["HOST_ADDRESS"], 9400), 20) as plain:
    with context.wrap_socket(plain, server_hostname=host) as secure:
        lines = ["GET /metrics HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {token}"]
        secure.sendall("\\r\\n".join([*lines, "", ""]).encode())
        with secure.makefile() as answer:
            print(answer.read())
"""


@dataclass
class Story:
    """What was seen while the run went on."""

    pods: Pods
    learners: list[list[Pod]] = field(default_factory=list)
    deleted_server: list[int] = field(default_factory=list)
    deleted_node: list[int] = field(default_factory=list)
    metrics: str = ""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.pods.volume("quickstart-runs") / "quickstart"

    @property
    def step(self) -> int:
        """The newest step that a learner's log shows."""
        text = "".join(gang[0].log for gang in self.learners)
        matches = re.findall(rf"step +(\d+)/{STEPS}", text)
        return int(matches[-1]) if matches else 0

    def ask_metrics(self) -> bool:
        """Asks as Prometheus does, which would ask again after an answer that comes too late."""
        first = self.learners[0][0].container
        answer = first.execute(["python", "-c", ASK_METRICS])
        self.metrics = answer.stdout + answer.stderr
        return answer.returncode == 0

    def wait(self, what: str, is_there: Any) -> None:
        """Waits for it; servers that end meanwhile are started again."""

        def look() -> bool:
            for pod in self.pods.pods:
                is_server = pod.spec.get("restartPolicy") == "Always"
                if is_server and not pod.is_deleted and pod.exit_code is not None:
                    self.pods.restart_container(pod)
            gang = self.learners[-1]
            codes = [pod.exit_code for pod in gang if not pod.is_deleted]
            assert not any(codes), f"{codes}\n{self.pods.logs()}"
            return bool(is_there())

        wait_for(what, LIMIT_S, look, self.pods)


def manifests(folder: Path) -> list[dict[str, Any]]:
    """What Helm, our script and kubectl make of the chart, the secrets and the user's code."""
    for name, text in CODE.items():
        (folder / "code").mkdir(exist_ok=True)
        (folder / "code" / name).write_text(text)
    values = VALUES | {"settings": [*SETTINGS, f"run.steps={STEPS}"]}
    (folder / "values.json").write_text(json.dumps(values))
    chart = helm_chart.rendered(RUN, f"--values={folder / 'values.json'}")
    hosts = (f"{RUN}-learner-0-0.{RUN}", f"{RUN}-queue")
    secrets = helm_chart.secrets_of(RUN, folder / "secrets", *hosts)
    make = ["create", "configmap", f"{RUN}-code", f"--from-file={folder / 'code'}"]
    command = [
        str(helm_chart.TOOLS / "kubectl"),
        *make,
        "--dry-run=client",
        "--output=yaml",
    ]
    code = completed(command, check=True).stdout
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}
    return [*helm_chart.resources(f"{chart}\n---\n{secrets}\n{code}"), claim]


def carry_out(story: Story) -> None:
    """The run with its three accidents."""
    pods = story.pods
    program = Path(__file__).parents[1] / "support" / "fakes" / "tls_valkey.py"
    # The wheel's Valkey has no TLS.
    queue = pods.resources["StatefulSet", "quickstart-queue"]["spec"]["template"][
        "spec"
    ]
    mount = Mount(program, Path("/tls_valkey.py"))
    command = ["python", "/tls_valkey.py", *queue["containers"][0]["command"][1:]]
    pods.start_stateful_set("quickstart-queue", command, [mount])
    first, second = pods.start_deployment(SERVERS)
    story.learners.append(pods.start_jobset("quickstart"))
    learner = story.learners[0][0]
    story.wait("the controller answers", learner.is_ready)
    story.wait("both servers are ready", lambda: first.is_ready() and second.is_ready())
    story.wait("the run makes steps", lambda: story.step >= 10)
    story.wait("Prometheus is answered", story.ask_metrics)
    story.deleted_server = pods.delete(second)
    third = pods.add_pod(SERVERS)
    # Without a server the run makes no step while these load.
    first.container.kill()
    story.wait("a server is ready again", lambda: first.is_ready() or third.is_ready())
    before = story.step
    story.wait("the run goes on", lambda: story.step >= before + 3)
    # A single node of the gang is drained; then JobSet starts all again.
    story.deleted_node = pods.delete(story.learners[0][1])
    story.wait("the others end too", lambda: learner.exit_code is not None)
    story.learners.append(pods.start_jobset("quickstart"))
    gang = story.learners[1]
    story.wait(
        "the run is finished", lambda: all(pod.exit_code is not None for pod in gang)
    )


@pytest.fixture(scope="module")
def story(tiny_model: Path) -> Iterator[Story]:
    # Short, because sockets lie in it, and readable for the containers' user.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-pods-"))
    folder.chmod(0o755)
    try:
        resources = manifests(folder)
        with Network(folder / "hosts", user=USER) as network:
            pods = Pods(resources, folder, network)
            model = pods.volume("models") / "tiny"
            shutil.copytree(tiny_model, model)
            for path in model.iterdir():
                path.chmod(0o644)
            story = Story(pods)
            carry_out(story)
            yield story
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_run_has_learned_and_trained_each_group_once(story: Story) -> None:
    check_finished(story.run, steps=STEPS)


def test_a_deleted_pod_leaves_in_order_and_a_gang_resumes(story: Story) -> None:
    first, second = story.learners
    assert story.deleted_server == [0]
    assert "has left" in next(pod for pod in story.pods.pods if pod.is_deleted).log
    assert (story.deleted_node, first[0].exit_code) == ([143], 0), story.pods.logs()
    assert "stopped at version" in first[0].log
    assert [pod.exit_code for pod in second] == [0, 0]
    # The names are the same, the addresses are not.
    assert [pod.host_name for pod in first] == [pod.host_name for pod in second]
    assert not {pod.address for pod in first} & {pod.address for pod in second}


def test_the_first_pod_tells_prometheus_of_its_controller(story: Story) -> None:
    planned = f'slipstream_planned_steps{{run="quickstart"}} {STEPS}.0'
    assert planned in story.metrics, story.metrics
