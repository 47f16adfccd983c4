"""Writes the roles as a kustomize folder: a JobSet for the learner, a Deployment for servers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent

from slipstream.client.launch.roles import (
    LEARNER,
    QUEUE_ENDS,
    ROLLOUT_SERVER,
    Role,
    Roles,
    Site,
    controller_port,
    learner_nodes,
    learner_role,
    master_port,
    roles_of,
)
from slipstream.client.launch.shipped_code import ShippedCode, model_folders
from slipstream.client.launch.template import filled_template, shell_command
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.config import Config

TEMPLATES = Path(__file__).with_name("kubernetes")
FURTHER_LEARNER = "learner-node"
SECRETS = "/run/slipstream"
CONFIG_FILE = "/etc/slipstream/config.toml"
UNPRIVILEGED = (
    "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}"
)
# Servers may start before the learner, and wait for it between two of its starts.
PATIENCE_S = 3600.0
# `kubectl apply` keeps a second copy in an annotation, which may have 256 KiB; this leaves room.
CONFIG_MAP_BYTES = 250_000
METRICS_TOKEN = "metrics_token"
TOKENS = {FURTHER_LEARNER: "trainer_token", ROLLOUT_SERVER: "rollout_server_token"}
QUEUE_SECRETS = ("ca.pem", "server.pem", "server.key", "redis.acl", "redis_controller_password")
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST_NAME = 63
_KEY = re.compile(r"[A-Za-z0-9_./-]+")
_PLAIN = re.compile(r"(?=.*[a-z])[\w./$()@%+=-]+(:[\w./$()@%+=-]+)*")


class Pods:
    """Writes the Kubernetes files of one run, and adapts its settings to the pods."""

    def __init__(
        self, path: Path, overrides: Sequence[str], code: ShippedCode, *, on_gpus: bool
    ) -> None:
        """Takes the settings file `path` with its overrides, and the `code` to ship to the pods.

        Raises ConfigError if Kubernetes refuses the run's name, or a file name in `code`.
        """
        config = load_config(path, overrides)
        self.run = config.run.name
        self.nodes, _ = learner_nodes(config)
        check_name(self.run, self.nodes)
        check_keys(code)
        self.text = path.read_text()
        self.code = code
        self.on_gpus = on_gpus
        # Where pods find the folders of models.
        self.models = {k: f"/models/{path.name}" for k, path in model_folders(config).items()}
        prometheus = config.tracking.prometheus
        self.metrics_port = address_parts(prometheus)[1] if prometheus else 0
        self.components = ("kueue", *(("monitor", "scaling") if self.metrics_port else ()))
        self.has_queue = config.queue.kind == "redis" and config.queue.redis_url is None
        # Host name of the learner's first pod in the run's namespace.
        self.host = f"{self.run}-{LEARNER}-0-0.{self.run}"
        self.controller = f"{self.host}:{controller_port(config)}"
        self.master = f"{self.host}:{master_port(config)}"
        settings = [*overrides, *self._places(config)]
        self.config = load_config(path, [*settings, *_secret_places(config, self.has_queue)])
        self.site = Site(CONFIG_FILE, tuple(settings), SECRETS)
        self.roles: Roles = roles_of(self.config, self.site, on_gpus=on_gpus)

    def _places(self, config: Config) -> list[str]:
        """Returns overrides for settings of folders and servers, which have other names in pods."""
        places = ['run.dir="/runs"']
        places += [f"{setting}={json.dumps(path)}" for setting, path in self.models.items()]
        if self.metrics_port:
            # Only the learner's first pod has a certificate for callers from other hosts.
            places.append(f'tracking.prometheus="127.0.0.1:{self.metrics_port}"')
        if self.has_queue:
            url = f"rediss://{self.run}-queue:6380/0?ssl_ca_certs={SECRETS}/ca.pem"
            places.append(f'queue.redis_url="{url}"')
        return places

    def files(self, folder: str) -> dict[str, str]:
        """Returns the text of each file by its name; `folder` is where the files will be saved."""
        learner, server = self.roles[LEARNER], self.roles[ROLLOUT_SERVER]
        jobs = self._job(learner, LEARNER, 1)
        secrets = {LEARNER: learner}
        if self.nodes > 1:
            further = learner_role(self.config, self.site, on_gpus=self.on_gpus, is_first=False)
            jobs += self._job(further, FURTHER_LEARNER, self.nodes - 1)
            secrets[FURTHER_LEARNER] = further
        secrets[ROLLOUT_SERVER] = server
        # The controller's port and the trainer's, which Prometheus scrapes.
        first, last = self.metrics_port, self.metrics_port + 1
        rule = f"    - ports: [{{port: {first}, endPort: {last}}}]\n" if first else ""
        files = {
            "kustomization.yaml": self._kustomization(folder, secrets),
            "learner.yaml": self._filled(
                "learner.yaml",
                nodes=self.nodes,
                s="s" * (self.nodes > 1),
                restarts=learner.restarts,
                jobs=indent(jobs, "    "),
            ),
            "rollout-server.yaml": self._filled(
                "rollout-server.yaml",
                count=server.count.usual,
                pod=indent(self._pod(server, ROLLOUT_SERVER), "      "),
            ),
            "network.yaml": self._filled("network.yaml", metrics=rule),
            "claims.yaml": self._claims(),
            "config.toml": self.text,
            ".gitignore": "secrets/\n",
        }
        for component in self.components:
            for path in sorted((TEMPLATES / component).iterdir()):
                name = f"{component}/{path.name}"
                files[name] = self._filled(name)
        if self.has_queue:
            files["queue.yaml"] = self._filled("queue.yaml")
        copies = {} if self.code.in_place else self.code.files
        return files | {f"code/{name}": text for name, text in copies.items()}

    def commands(self, folder: Path) -> list[list[str]]:
        """Returns the commands that make the secrets and start the run, from files in `folder`."""
        servers = [f"{self.run}-queue"] * self.has_queue
        return [
            ["deploy/make_certificates.sh", str(folder / "secrets"), self.host, *servers],
            ["kubectl", "apply", "--filename", str(folder / "claims.yaml")],
            ["kubectl", "apply", "--kustomize", str(folder)],
        ]

    def _filled(self, name: str, **values: object) -> str:
        path = TEMPLATES / name
        return filled_template(path, run=self.run, host=self.host, **values).rstrip() + "\n"

    def _job(self, role: Role, name: str, replicas: int) -> str:
        pod = indent(self._pod(role, name), "          ")
        return self._filled("replicated_job.yaml", role=name, replicas=replicas, pod=pod)

    def _pod(self, role: Role, name: str) -> str:
        is_server = name == ROLLOUT_SERVER
        has_metrics = self.metrics_port and name == LEARNER
        command = [*role.command]
        if is_server:
            command.append(f"--connect-timeout-s={PATIENCE_S:.0f}")
        if has_metrics:
            command += [
                f'tracking.prometheus="${{HOST_ADDRESS}}:{self.metrics_port}"',
                f"security.metrics_token_file={SECRETS}/{METRICS_TOKEN}",
            ]
        scraped = {"controller": self.metrics_port, "trainer": self.metrics_port + 1}
        ports = [f"{{name: {each}, containerPort: {port}}}" for each, port in scraped.items()]
        claim = f"persistentVolumeClaim: {{claimName: {self.run}-runs}}"
        gpus = f"      limits:\n        nvidia.com/gpu: {role.gpus}\n"
        models = "  - name: models\n    persistentVolumeClaim: {claimName: models}\n"
        mount = "      - {name: models, mountPath: /models, readOnly: true}\n"
        return self._filled(
            "pod.yaml",
            role=name,
            restart="Always" if is_server else "Never",
            grace=math.ceil(role.grace_s),
            command=_items([_reference(word) for word in command], 6),
            env=self._env(role, "HOST_ADDRESS" if has_metrics else ""),
            cpus=role.cpus,
            ports=f"    ports: [{', '.join(ports)}]\n" if has_metrics else "",
            unprivileged=UNPRIVILEGED,
            gpus=gpus if role.gpus else "",
            probes="" if name == FURTHER_LEARNER else _probes(role, name),
            init="" if is_server else self._wait_for_name(),
            code=indent(self._code_volume(), "    "),
            models=models if self.models else "",
            models_mount=mount if self.models else "",
            runs="emptyDir: {}" if is_server else claim,
        )

    def _env(self, role: Role, further: str = "") -> str:
        fields = {
            "NODE_RANK": "metadata.labels['jobset.sigs.k8s.io/job-global-index']",
            "HOST_ADDRESS": "status.podIP",
            "SERVER_ID": "metadata.name",
        }
        values = {"CONTROLLER_ADDRESS": self.controller, "MASTER_ADDRESS": self.master}
        lines = []
        for name in filter(None, (*(variable.name for variable in role.variables), further)):
            lines.append(f"- name: {name}")
            if name in values:
                lines.append(f"  value: {values[name]}")
            else:
                field = json.dumps(fields[name])
                lines.append(f"  valueFrom: {{fieldRef: {{fieldPath: {field}}}}}")
        return indent("\n".join(lines), "      ")

    def _wait_for_name(self) -> str:
        """Returns the init container that waits until the learner's first pod has a DNS name."""
        wait = f"until getent hosts {self.host}; do sleep 1; done"
        return (
            "initContainers:\n  - name: name\n    image: slipstream\n"
            f'    command: [sh, -c, "{wait}"]\n    securityContext: {UNPRIVILEGED}\n'
        )

    def _code_volume(self) -> str:
        if not self.code.files:
            return "emptyDir: {}"
        lines = [f"configMap:\n  name: {self.run}-code"]
        if any("/" in name for name in self.code.files):
            lines.append("  items:")
            lines += [f"    - {{key: {_key(f)}, path: {f}}}" for f in self.code.files]
        return "\n".join(lines)

    def _claims(self) -> str:
        names = " and ".join(sorted({path.removeprefix("/") for path in self.models.values()}))
        claim = self._filled("models_claim.yaml", models=names)
        return self._filled(
            "claims.yaml",
            access="ReadWriteMany" if self.nodes > 1 else "ReadWriteOnce",
            models=claim if self.models else "",
        )

    def _kustomization(self, folder: str, roles: Mapping[str, Role]) -> str:
        resources = ["learner.yaml", "rollout-server.yaml", "network.yaml"]
        secrets = {
            name: [_secret(Path(secret.file).name, name) for secret in role.secrets]
            for name, role in roles.items()
        }
        if self.metrics_port:
            secrets[LEARNER].append(_secret(METRICS_TOKEN))
        if self.has_queue:
            resources.append("queue.yaml")
            secrets["queue"] = [_secret(name) for name in QUEUE_SECRETS]
        lines = []
        for name, files in secrets.items():
            lines.append(f"  - name: {self.run}-{name}\n    files:")
            lines += [f"      - {file}" for file in files]
        code = ""
        if self.code.files:
            code = f"  - name: {self.run}-code\n    files:\n" + "".join(
                f"      - {_key(name)}=code/{name}\n" for name in self.code.files
            )
        return self._filled(
            "kustomization.yaml",
            folder=folder,
            resources=_items(resources, 2),
            components=", ".join(self.components),
            tag="gpu" if self.on_gpus else "cpu",
            code=code,
            secrets="\n".join(lines),
        )


def check_keys(code: ShippedCode) -> None:
    """Raises ConfigError for a file that no ConfigMap can hold under its name."""
    for name in code.files:
        if _KEY.fullmatch(name) is None:
            raise ConfigError(
                f"--code: a file in a ConfigMap has a name of letters, digits, '.', '_' and '-', "
                f"got {name!r}"
            )


def check_name(run: str, nodes: int) -> None:
    """Raises ConfigError unless names of pods and services can begin with the name `run`."""
    # Kubernetes adds five letters to the names of pods.
    longest = LONGEST_NAME - max(
        len(f"-{FURTHER_LEARNER}-{nodes}-0-abcde"), len(f"-{ROLLOUT_SERVER}-0123456789-abcde")
    )
    if DNS_LABEL.fullmatch(run) is None or len(run) > longest:
        raise ConfigError(
            f"run.name must be a name in Kubernetes: small letters, digits and '-', a letter "
            f"first, at most {longest} of them, got {run!r}; run.name=NAME gives another"
        )


def _secret_places(config: Config, has_queue: bool) -> list[str]:
    """Returns overrides with the paths of secret files in pods.

    With `has_queue` the run has its own queue server, and the overrides set the queue's users too.
    """
    names = {"tls_ca": "ca.pem", "token_file": "token"}
    names |= {"tls_certificate": "server.pem", "tls_key": "server.key"}
    places = [f"security.{setting}={SECRETS}/{name}" for setting, name in names.items()]
    for end in QUEUE_ENDS:
        role = end.removesuffix("_server")
        if has_queue:
            places.append(f"queue.{end}.user={role}")
        if has_queue or config.queue.user_of(end) is not None:
            places.append(f"queue.{end}.password_file={SECRETS}/redis_{role}_password")
    return places


def _probes(role: Role, name: str) -> str:
    """Returns a pod's probes as YAML; a shell runs their command, and expands variables in it."""
    command = shell_command(["exec", *role.health.command], indent=0).replace(" \\\n", " ")
    health = "exec: *health"
    start = math.ceil((PATIENCE_S + role.health.patience_s) / 10)
    lines = [
        "readinessProbe:",
        f"  exec: &health {{command: [sh, -c, {json.dumps(command)}]}}",
        "  periodSeconds: 15",
        "  timeoutSeconds: 20",
    ]
    if name == ROLLOUT_SERVER:
        lines += ["# It may wait for the learner before it loads.", "startupProbe:", f"  {health}"]
        lines += ["  periodSeconds: 10", "  timeoutSeconds: 20", f"  failureThreshold: {start}"]
        # Without its controller a server ends by itself.
        lines += ["livenessProbe:", f"  {health}", "  periodSeconds: 30", "  timeoutSeconds: 20"]
        lines += ["  failureThreshold: 10"]
    return indent("\n".join(lines) + "\n", "    ")


def _reference(word: str) -> str:
    """Returns a command's word in the kubelet's syntax: ${NAME} becomes $(NAME), $( becomes $$(."""
    return re.sub(r"\$\{([A-Z_]+)\}", r"$(\1)", word.replace("$(", "$$("))


def _key(name: str) -> str:
    """Returns the key of a file in a ConfigMap: its path with ".." in place of "/"."""
    return name.replace("/", "..")


def _secret(name: str, role: str = "") -> str:
    """Returns a file entry of a Secret; each role in `TOKENS` has its own token file."""
    token = TOKENS.get(role) if name == "token" else None
    return f"token=secrets/{token}" if token else f"secrets/{name}"


def _items(words: Sequence[str], spaces: int) -> str:
    return "\n".join(f"{' ' * spaces}- {_word(word)}" for word in words)


def _word(word: str) -> str:
    is_plain = _PLAIN.fullmatch(word) and word not in ("true", "false", "yes", "no", "null")
    return word if is_plain else json.dumps(word)
