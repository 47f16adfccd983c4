"""The setup (versions, settings, model, clock) that instances of a run compare before loading.

The controller sends its setup; rollout servers and the learner's further nodes compare their own.
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.machine.description import installed
from slipstream.core.models.model_files import tokenizer_digest, weights_digest
from slipstream.core.settings.config import Config, flat_settings, is_below
from slipstream.protocol.codec import PROTOCOL_VERSION
from slipstream.protocol.release import OURS, RELEASE
from slipstream.v1 import status_pb2

# Packages of which all trainer ranks need the same version; ours is compared everywhere.
RANKS_PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformer-engine", "transformers")
# Sections and settings that all trainer ranks must have alike.
OF_RANKS = (
    "run.name",
    "run.steps",
    "run.seed",
    "model",
    "algorithm",
    "environments",
    "sampling",
    "learner",
    "lora",
    "critic",
    "reference",
    "weights",
    "checkpoint",
    "debug",
)
# Settings that a rollout server must have like the controller.
OF_SERVERS = ("run.name", "model", "lora", "queue.kind", "algorithm.router_replay")
# Settings that belong to a host; copies of a folder may have names of their own.
LOCAL = ("learner.devices", "learner.master", "learner.threads")
LOCAL_NAMES = ("path", "python", "load")
# Settings of a rollout server that must be at least as large as the controller's.
ROOM = {
    "sampling.max_episode_tokens": "sampling.max_episode_tokens",
    "queue.max_bytes": "queue.max_bytes",
    "rollout_server.max_episodes": "algorithm.group_size",
}
# Longer values are compared by their digests.
LONGEST_VALUE = 1024
# If clocks differ by more, events of a run have wrong times, and certificates may be refused.
MAX_SKEW_S = 10.0


@dataclass(frozen=True)
class Answer:
    """A controller's setup, with the times by this host's clock before and after the call."""

    setup: status_pb2.Setup
    asked_s: float
    answered_s: float

    @property
    def skew_s(self) -> float:
        """Seconds by which this host's clock is at least ahead (above 0) or behind (below 0)."""
        ahead = self.asked_s - self.setup.unix_time_s
        behind = self.answered_s
        behind -= self.setup.unix_time_s
        return ahead if ahead > 0 else min(behind, 0.0)


def describe_setup(config: Config, *, run_id: str, mark: str) -> status_pb2.Setup:
    """Returns this host's setup without its clock; file `mark` in `run.dir` contains the run id."""
    values = compared(config)
    python = ".".join(platform.python_version_tuple()[:2])
    compared_names = {*OF_RANKS, *OF_SERVERS, *ROOM.values()}
    return status_pb2.Setup(
        run_id=run_id,
        protocol_version=PROTOCOL_VERSION,
        versions={"python": python, OURS: RELEASE, **installed(RANKS_PACKAGES)},
        settings={key: values[key] for key in values if is_below(key, compared_names)},
        model_digest=model_digest(config.model.path),
        mark=mark,
    )


def differences(answer: Answer, config: Config, *, of_ranks: bool) -> Iterator[str]:
    """Yields one line for each part of this host's setup that does not fit the controller's.

    With `of_ranks` the host runs trainer ranks, else a rollout server.
    """
    theirs = answer.setup
    ours = describe_setup(config, run_id="", mark="")
    alike = "start all instances of a run with the same settings"
    for name in (OURS, *(("python", *RANKS_PACKAGES) if of_ranks else ())):
        here, there = (setup.versions.get(name, "none") for setup in (ours, theirs))
        if here != there:
            yield (
                f"{name} {here} here, the controller's host has {there}: install the same versions "
                "on all hosts"
            )
    if abs(answer.skew_s) > MAX_SKEW_S:
        way = "ahead of" if answer.skew_s > 0 else "behind"
        yield (
            f"the clock of this host is {abs(answer.skew_s):.0f} s {way} the controller's, at most "
            f"{MAX_SKEW_S:g} s are allowed: let both hosts set their clocks by NTP"
        )
    compared_names = OF_RANKS if of_ranks else OF_SERVERS
    for key in sorted({*ours.settings, *theirs.settings}):
        here, there = (setup.settings.get(key, "not set") for setup in (ours, theirs))
        if here != there and is_below(key, compared_names):
            yield f"{key} is {here} here and {there} at the controller: {alike}"
    values = compared(config)
    for setting, key in ROOM.items() if not of_ranks else ():
        here = values[setting]
        there = theirs.settings.get(key, "0")
        if int(here) < int(there):
            yield f"{setting} is {here} here, the controller needs {there} ({key}): {alike}"
    if ours.model_digest != theirs.model_digest:
        yield (
            f"model.path: {config.model.path} is not the controller's model: config.json, the "
            "tokenizer, its chat template or weights differ"
        )


def holds_mark(config: Config, theirs: status_pb2.Setup) -> bool:
    """Whether `run.dir` is the controller's folder: its file `theirs.mark` then has the run id."""
    try:
        with (config.run.dir / theirs.mark).open("rb") as file:
            return theirs.run_id.encode() in file.read(1 << 16)
    except OSError:
        return False


def model_digest(folder: Path) -> bytes:
    """Returns a digest of config.json, tokenizer and weights; b"" if config.json is unreadable."""
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        digest.update(f"{tokenizer_digest(folder)} {weights_digest(folder)}".encode())
    except OSError:
        return b""
    return digest.digest()


def compared(config: Config) -> dict[str, str]:
    """Returns the settings as JSON texts by dotted name, without settings of single hosts.

    Long values, the arguments of environments, and folders of weights, which may have other names
    elsewhere, are replaced by their digests.
    """
    texts = {}
    for name, value in flat_settings(config.model_dump(mode="json", exclude_none=True)):
        is_local = is_below(name, LOCAL) or not {*name.split(".")}.isdisjoint(LOCAL_NAMES)
        if not is_local and value != {}:
            text = json.dumps(value, sort_keys=True)
            # Arguments of an environment may contain secrets.
            is_hidden = len(text) > LONGEST_VALUE or ".args." in name
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            texts[name] = f"sha256 {digest}" if is_hidden else text
    for name, folder in config.weight_folders.items():
        texts[name] = f"a folder of weights with digest {weights_digest(folder)[:16] or 'none'}"
    return texts
