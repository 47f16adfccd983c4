"""The pods of the Helm chart, carried out on hosts made of namespaces or by Docker Engine.

There is no API server here. What JobSet, the Deployment's controller and the kubelet do with these
manifests is done in small: names, labels, environment, volumes, users, probes, ends and new starts.
"""

import base64
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.rigs.namespaces import Container, Host, Mount, Network, image_environ, poll

SUBNET = "10.78.0"
INDEX_LABEL = "jobset.sigs.k8s.io/job-global-index"
START_LIMIT_S = 60.0
Table = dict[str, Any]


@dataclass(eq=False)
class Pod:
    """One pod: its place in the cluster and its only container."""

    name: str
    # The name under which others find it, if they do.
    host_name: str | None
    spec: Table
    labels: Mapping[str, str]
    address: str
    host: Host
    folder: Path
    containers: list[Container] = field(default_factory=list)
    is_deleted: bool = False

    @property
    def container(self) -> Container:
        return self.containers[-1]

    @property
    def log(self) -> str:
        """What all starts of its container have written."""
        return "".join(container.log for container in self.containers)

    @property
    def exit_code(self) -> int | None:
        return self.container.exit_code

    def is_ready(self) -> bool:
        """Whether its readiness probe succeeds now."""
        probe = self.spec["containers"][0]["readinessProbe"]["exec"]["command"]
        return self.exit_code is None and self.container.execute(probe).returncode == 0


class Pods:
    """What a namespace of Kubernetes would hold; made for a folder that was written by us."""

    def __init__(
        self, manifests: Sequence[Table], folder: Path, network: Network
    ) -> None:
        """`folder` keeps the volumes; `network` has the cluster's hosts and ends with its owner."""
        self._folder = folder
        self._network = network
        self._environ = image_environ()
        self._names: dict[str, str] = {}
        self._count = 0
        self.pods: list[Pod] = []
        self.resources: dict[tuple[str, str], Table] = {}
        for manifest in manifests:
            self.resources[manifest["kind"], manifest["metadata"]["name"]] = manifest
            if manifest["kind"] == "PersistentVolumeClaim":
                self.volume(manifest["metadata"]["name"]).mkdir(parents=True)

    def volume(self, claim: str) -> Path:
        return self._folder / "claims" / claim

    def start_jobset(self, name: str) -> list[Pod]:
        """Makes the pods of a JobSet; at a new start they keep their names, not their addresses."""
        spec = self.resources["JobSet", name]["spec"]
        pods = []
        index = 0
        for job in spec["replicatedJobs"]:
            template = job["template"]["spec"]
            assert (template["completions"], template["parallelism"]) == (1, 1)
            for number in range(job["replicas"]):
                host_name = f"{name}-{job['name']}-{number}-0"
                labels = template["template"]["metadata"]["labels"] | {
                    INDEX_LABEL: str(index)
                }
                spec_of_pod = template["template"]["spec"]
                pods.append(self._make(host_name, spec_of_pod, labels, host_name, name))
                index += 1
        for pod in pods:
            self._start(pod)
        return pods

    def start_deployment(self, name: str) -> list[Pod]:
        template = self.resources["Deployment", name]["spec"]
        return [self.add_pod(name) for _ in range(template["replicas"])]

    def add_pod(self, name: str) -> Pod:
        template = self.resources["Deployment", name]["spec"]["template"]
        pod = self._make(
            f"{name}-5d9c7b", template["spec"], template["metadata"]["labels"]
        )
        self._start(pod)
        return pod

    def start_stateful_set(
        self, name: str, command: Sequence[str], mounts: list[Mount]
    ) -> Pod:
        """Makes the only pod of a StatefulSet, by `command` in place of its image's program.

        A word * of the command becomes the pod's address.
        """
        resource = self.resources["StatefulSet", name]["spec"]
        (claim,) = resource["volumeClaimTemplates"]
        data = self.volume(f"{claim['metadata']['name']}-{name}-0")
        data.mkdir(parents=True, exist_ok=True)
        spec = resource["template"]["spec"]
        volume = {"name": claim["metadata"]["name"], "persistentVolumeClaim": {}}
        volume["persistentVolumeClaim"] = {"claimName": data.name}
        spec = spec | {"volumes": [*spec["volumes"], volume]}
        assert ("Service", name) in self.resources
        pod = self._make(f"{name}-0", spec, resource["template"]["metadata"]["labels"])
        self._names[name] = pod.address
        self._write_names()
        (container,) = spec["containers"]
        words = [pod.address if word == "*" else word for word in command]
        self._run(pod, container | {"command": words}, mounts)
        return pod

    def delete(self, *pods: Pod) -> list[int]:
        """Ends pods together, as `kubectl delete` does; the exit codes of their containers."""
        for pod in pods:
            pod.is_deleted = True
            init = pod.container.init_pid()
            if init is not None:
                os.kill(init, signal.SIGTERM)
        for pod in pods:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.container.process.wait(pod.spec["terminationGracePeriodSeconds"])
            pod.container.kill()
        return [pod.container.process.returncode for pod in pods]

    def restart_container(self, pod: Pod) -> None:
        """Starts the container of a pod again, as the kubelet does when it has ended."""
        assert pod.spec["restartPolicy"] == "Always"
        self._run(pod, pod.spec["containers"][0], [])

    def _make(
        self,
        name: str,
        spec: Table,
        labels: Mapping[str, str],
        host_name: str | None = None,
        subdomain: str = "",
    ) -> Pod:
        self._count += 1
        address = f"{SUBNET}.{10 + self._count}"
        pod_name = f"{name}-{self._count:05x}"
        host = self._network.add_host(pod_name, address)
        if host_name is not None:
            host.name = host_name
            self._names[f"{host_name}.{subdomain}"] = address
        folder = self._folder / "pods" / pod_name
        pod = Pod(pod_name, host_name, spec, labels, address, host, folder)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        self.pods.append(pod)
        return pod

    def _start(self, pod: Pod) -> None:
        self._write_names()
        for container in pod.spec.get("initContainers", []):
            started = self._run(pod, container, [], keep=False)
            assert started.process.wait(START_LIMIT_S) == 0, started.log
        self._run(pod, pod.spec["containers"][0], [])

    def _run(
        self, pod: Pod, container: Table, mounts: list[Mount], *, keep: bool = True
    ) -> Container:
        environ = {
            variable["name"]: self._value(variable, pod)
            for variable in container.get("env", [])
        }
        command = [
            re.sub(
                r"\$\$|\$\((\w+)\)",
                lambda found: environ[found[1]] if found[1] else "$",
                word,
            )
            for word in container["command"]
        ]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        started = pod.host.run(
            f"{container['name']}-{len(pod.containers)}",
            command,
            environ=self._environ | environ,
            mounts=[*self._mounts(pod, container), *mounts],
            working_folder=container.get("workingDir", "/"),
            hosts={pod.host.name: pod.address, **self._names},
        )
        if keep:
            pod.containers.append(started)
        return started

    def _value(self, entry: Table, pod: Pod) -> str:
        if "value" in entry:
            assert isinstance(entry["value"], str)
            return entry["value"]
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        if label is not None:
            return pod.labels[label[1]]
        return {"metadata.name": pod.name, "status.podIP": pod.address}[path]

    def _mounts(self, pod: Pod, container: Table) -> Iterator[Mount]:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in container.get("volumeMounts", []):
            source = self._source(pod, volumes[mount["name"]])
            yield Mount(
                source, Path(mount["mountPath"]), writable=not mount.get("readOnly")
            )

    def _source(self, pod: Pod, volume: Table) -> Path:
        """The folder of a volume, with the group and the modes that the kubelet gives it."""
        group = pod.spec["securityContext"]["fsGroup"]
        if "persistentVolumeClaim" in volume:
            folder = self.volume(volume["persistentVolumeClaim"]["claimName"])
            os.chown(folder, -1, group)
            folder.chmod(0o2775)
            return folder
        folder = pod.folder / volume["name"]
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        mode = 0o644
        files: dict[str, bytes] = {}
        if "configMap" in volume:
            data = self.resources["ConfigMap", volume["configMap"]["name"]]["data"]
            files = {name: text.encode() for name, text in data.items()}
        elif "secret" in volume:
            data = self.resources["Secret", volume["secret"]["secretName"]]["data"]
            files = {name: base64.b64decode(text) for name, text in data.items()}
            mode = volume["secret"]["defaultMode"]
        else:
            assert "emptyDir" in volume
        for name, content in files.items():
            (folder / name).write_bytes(content)
            os.chown(folder / name, 0, group)
            (folder / name).chmod(mode)
        os.chown(folder, 0, group)
        folder.chmod(0o2777)
        return folder

    def _write_names(self) -> None:
        """Tells the pods that run what the cluster's name server would."""
        for pod in self.pods:
            for path in pod.host.folder.glob("*/hosts"):
                names = {
                    "localhost": "127.0.0.1",
                    pod.host.name: pod.address,
                    **self._names,
                }
                path.write_text("".join(f"{ip} {name}\n" for name, ip in names.items()))

    def logs(self) -> str:
        """The ends of all pods' logs, for a failure's message."""
        return "\n".join(f"--- {pod.name}\n{pod.log[-4000:]}" for pod in self.pods)


def wait_for(what: str, limit_s: float, is_there: Any, pods: Pods) -> None:
    """Waits until `is_there()` holds; fails with all logs."""
    started = time.monotonic()
    for _ in poll(limit_s, every_s=2.0):
        if is_there():
            print(f"{what}: after {time.monotonic() - started:.0f} s")
            return
    raise AssertionError(f"not within {limit_s:.0f} s: {what}\n{pods.logs()}")
