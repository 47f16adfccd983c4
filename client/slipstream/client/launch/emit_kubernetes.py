"""The roles as a kustomize folder: a JobSet for the learner, a Deployment for rollout servers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent

from slipstream.client.launch.emit_slurm import shell_command
from slipstream.client.launch.roles import (
    LEARNER,
    QUEUE_ENDS,
    ROLLOUT_SERVER,
    Role,
    Roles,
    Site,
    controller_port,
    further_learner,
    learner_nodes,
    master_port,
    roles_of,
)
from slipstream.client.launch.shipped_code import ShippedCode
from slipstream.client.launch.template import filled_template
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
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
# What the API server takes for the data of a ConfigMap.
CONFIG_MAP_BYTES = 1 << 20
# The number of servers that the run itself would like to have.
SCALING_QUERY = 'max(slipstream_wanted_servers{run="%s"})'
MOST_SERVERS = 64
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
LONGEST_NAME = 63
_PLAIN = re.compile(r"(?=.*[a-z])[\w./$()@%+=-]+(:[\w./$()@%+=-]+)*")
# Where a name of the hub says which state of a model it means.
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*@[\w./-]+")
QUEUE_COMMAND = (
    *(
        "valkey-server",
        "--bind",
        "*",
        "--port",
        "0",
        "--tls-port",
        "6380",
        "--tls-auth-clients",
        "no",
    ),
    *("--tls-cert-file", f"{SECRETS}/server.pem", "--tls-key-file", f"{SECRETS}/server.key"),
    *("--tls-ca-cert-file", f"{SECRETS}/ca.pem", "--aclfile", f"{SECRETS}/redis.acl"),
    *("--dir", "/data", "--save", "", "--appendonly", "yes", "--appendfsync", "always"),
    *("--maxmemory", "4gb", "--maxmemory-policy", "noeviction"),
    *("--no-appendfsync-on-rewrite", "no"),
)


class Pods:
    """The pods of one run: its settings inside them, their names and their files."""

    def __init__(
        self, path: Path, overrides: Sequence[str], code: ShippedCode, *, on_gpus: bool
    ) -> None:
        """ConfigError if the run's name cannot be one of Kubernetes."""
        config = load_config(path, overrides)
        self.run = config.run.name
        self.nodes, _ = learner_nodes(config)
        check_name(self.run, self.nodes)
        self.text = path.read_text()
        self.code = code
        self.on_gpus = on_gpus
        self.model = "" if _HUB_MODEL.fullmatch(str(config.model.path)) else config.model.path.name
        self.has_queue = config.queue.kind == "redis" and config.queue.redis_url is None
        # How the first pod of the learner is found in the run's namespace.
        self.host = f"{self.run}-{LEARNER}-0-0.{self.run}"
        self.controller = f"{self.host}:{controller_port(config)}"
        self.master = f"{self.host}:{master_port(config)}"
        settings = [*overrides, *self._places(config)]
        self.config = load_config(path, [*settings, *_secret_places(config, self.has_queue)])
        self.site = Site(CONFIG_FILE, tuple(settings), SECRETS)
        self.roles: Roles = roles_of(self.config, self.site, on_gpus=on_gpus)

    def _places(self, config: Config) -> list[str]:
        """Returns the settings that name folders and servers as pods see them."""
        places = ['run.dir="/runs"']
        if self.model:
            places.append(f"model.path={json.dumps(f'/models/{self.model}')}")
        if self.has_queue:
            url = f"rediss://{self.run}-queue:6380/0?ssl_ca_certs={SECRETS}/ca.pem"
            places.append(f'queue.redis_url="{url}"')
        return places

    def files(self, folder: str) -> dict[str, str]:
        """Returns the text of each file by its name; `folder` is where they will lie."""
        learner, server = self.roles[LEARNER], self.roles[ROLLOUT_SERVER]
        jobs = self._job(learner, LEARNER, 1)
        secrets = {LEARNER: learner}
        if self.nodes > 1:
            further = further_learner(self.config, self.site, on_gpus=self.on_gpus)
            jobs += self._job(further, FURTHER_LEARNER, self.nodes - 1)
            secrets[FURTHER_LEARNER] = further
        secrets[ROLLOUT_SERVER] = server
        files = {
            "kustomization.yaml": self._kustomization(folder, secrets),
            "learner.yaml": self._filled(
                "learner.yaml",
                nodes=self.nodes,
                s="s" * (self.nodes > 1),
                host=self.host,
                restarts=learner.restarts,
                jobs=indent(jobs, "    "),
            ),
            "rollout-server.yaml": self._filled(
                "rollout-server.yaml",
                count=server.count.usual,
                pod=indent(self._pod(server, ROLLOUT_SERVER), "      "),
            ),
            "network.yaml": self._filled("network.yaml"),
            "claims.yaml": self._claims(),
            "config.toml": self.text,
            "kueue/kustomization.yaml": self._filled("kueue/kustomization.yaml"),
            "scaling/kustomization.yaml": self._filled("scaling/kustomization.yaml"),
            "scaling/scaledobject.yaml": self._filled(
                "scaling/scaledobject.yaml",
                most=max(MOST_SERVERS, server.count.usual),
                query=SCALING_QUERY % self.run,
            ),
            ".gitignore": "secrets/\n",
        }
        if self.has_queue:
            command = _items(QUEUE_COMMAND, 12)
            files["queue.yaml"] = self._filled("queue.yaml", command=command)
        return files | {f"code/{name}": text for name, text in self.code.copies.items()}

    def _filled(self, name: str, **values: object) -> str:
        return filled_template(TEMPLATES / name, run=self.run, **values).rstrip() + "\n"

    def _job(self, role: Role, name: str, replicas: int) -> str:
        pod = indent(self._pod(role, name), "          ")
        return self._filled("replicated_job.yaml", role=name, replicas=replicas, pod=pod)

    def _pod(self, role: Role, name: str) -> str:
        is_server = name == ROLLOUT_SERVER
        command = (
            [*role.command, f"--connect-timeout-s={PATIENCE_S:.0f}"]
            if is_server
            else (role.command)
        )
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
            env=self._env(role),
            cpus=role.cpus,
            unprivileged=UNPRIVILEGED,
            gpus=gpus if role.gpus else "",
            probes=_probes(role, name),
            init="" if is_server else self._wait_for_name(),
            code=indent(self._code_volume(), "    "),
            models=models if self.model else "",
            models_mount=mount if self.model else "",
            runs="emptyDir: {}" if is_server else claim,
        )

    def _env(self, role: Role) -> str:
        fields = {
            "NODE_RANK": "metadata.labels['jobset.sigs.k8s.io/job-global-index']",
            "HOST_ADDRESS": "status.podIP",
            "SERVER_ID": "metadata.name",
        }
        values = {"CONTROLLER_ADDRESS": self.controller, "MASTER_ADDRESS": self.master}
        lines = []
        for variable in role.variables:
            lines.append(f"- name: {variable.name}")
            if variable.name in values:
                lines.append(f"  value: {values[variable.name]}")
            else:
                field = json.dumps(fields[variable.name])
                lines.append(f"  valueFrom: {{fieldRef: {{fieldPath: {field}}}}}")
        return indent("\n".join(lines), "      ")

    def _wait_for_name(self) -> str:
        """Returns what keeps the learner until its first pod has a name: it listens there."""
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
        claim = self._filled("models_claim.yaml", model=f"models/{self.model}")
        return self._filled(
            "claims.yaml",
            access="ReadWriteMany" if self.nodes > 1 else "ReadWriteOnce",
            models=claim if self.model else "",
        )

    def _kustomization(self, folder: str, roles: Mapping[str, Role]) -> str:
        resources = ["learner.yaml", "rollout-server.yaml", "network.yaml"]
        secrets = {
            name: [Path(secret.file).name for secret in role.secrets]
            for name, role in roles.items()
        }
        if self.has_queue:
            resources.append("queue.yaml")
            secrets["queue"] = ["ca.pem", "server.pem", "server.key", "redis.acl"]
            secrets["queue"].append("redis_controller_password")
        lines = []
        for name, files in secrets.items():
            lines.append(f"  - name: {self.run}-{name}\n    files:")
            lines += [f"      - secrets/{file}" for file in files]
        code = ""
        if self.code.files:
            code = f"  - name: {self.run}-code\n    files:\n" + "".join(
                f"      - {_key(name)}=code/{name}\n" for name in self.code.files
            )
        return self._filled(
            "kustomization.yaml",
            folder=folder,
            resources=_items(resources, 2),
            tag="gpu" if self.on_gpus else "cpu",
            code=code,
            secrets="\n".join(lines),
        )


def check_name(run: str, nodes: int) -> None:
    """Raises ConfigError unless pods and services can have names that begin with the run's."""
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
    """Returns the settings of the secrets' files, as pods see them."""
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
    """Returns the probes; a shell fills in the variables, which the kubelet does not."""
    if name == FURTHER_LEARNER:
        return ""
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
    """Returns a word of a command as the kubelet reads it, which knows $(NAME)."""
    return re.sub(r"\$\{([A-Z_]+)\}", r"$(\1)", word.replace("$(", "$$("))


def _key(name: str) -> str:
    """Returns the key of a file in a ConfigMap, which has no folders."""
    return name.replace("/", "..")


def _items(words: Sequence[str], spaces: int) -> str:
    return "\n".join(f"{' ' * spaces}- {_word(word)}" for word in words)


def _word(word: str) -> str:
    is_plain = _PLAIN.fullmatch(word) and word not in ("true", "false", "yes", "no", "null")
    return word if is_plain else json.dumps(word)
