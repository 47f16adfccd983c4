"""The sections on environments, evaluation, tracking, profiling and debugging."""

import importlib.util
import shlex
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator
from slipstream.core.errors import ConfigError
from slipstream.core.extension import resolve, trackers
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.section import Address, Positive, Reference, Seconds, Section
from slipstream.core.template_values import TemplateValues

# Group of the entry points by which other packages add trackers.
TRACKERS = "slipstream.trackers"


# Between 0 and this temperature vLLM silently samples at this temperature.
MIN_TEMPERATURE = 0.01
# vLLM refuses requests above this temperature.
MAX_TEMPERATURE = 2.0
# Distance of a process's port from that in tracking.prometheus. Several rollout servers of one host
# take the first free ports of theirs.
METRICS_PORTS = {"controller": range(1), "rollout_server": range(1, 129)}


class PlayedSection(Section):
    """An environment: its class and arguments, and the worker processes that run its episodes."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # "package.module:Class". The controller's working directory is searched first.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Limit of one reset or step.
    timeout_s: Seconds = 60.0
    # Worker processes beside each rollout server.
    num_workers: Positive = 1
    # Passed by name to the chat template, before those of `rollout_server.chat_template_kwargs`.
    chat_template_kwargs: TemplateValues = {}
    # Interpreter of the workers, such as a virtual environment's. By default the rollout server's
    # own.
    python: Path | None = None
    # The one of `lora.adapters` that samples and trains its episodes.
    adapter: str | None = None


class EvaluationSection(PlayedSection):
    """One environment that is only evaluated, never trained on."""

    # Reward of an episode that passes, for
    # [pass@k](metrics.md#an-evaluation-round-in-metricsjsonl). By default 1, and there is no pass@k
    # in a round with a reward above 1: what passes is then unknown.
    pass_reward: float | None = None
    # Most episodes of a round, all samples of all tasks.
    num_episodes: Positive = 64
    # Episodes of each task, for [pass@k](metrics.md#an-evaluation-round-in-metricsjsonl). More than
    # 1 need a temperature above 0.
    samples_per_task: Positive = 1
    # Steps between rounds, besides those before the first and after the last step. A round measures
    # all evaluations.
    every_steps: int = Field(0, ge=0)
    # Sampling temperature, 0.01 or more, or 0 for the most probable token.
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    # By default `sampling.top_p`.
    top_p: float | None = Field(None, gt=0, le=1)
    # By default `sampling.max_reply_tokens`.
    max_reply_tokens: Positive | None = None

    @model_validator(mode="after")
    def _samples(self) -> Self:
        samples = self.samples_per_task
        if self.num_episodes % samples:
            raise ValueError(
                f"num_episodes must be a multiple of samples_per_task, "
                f"got {self.num_episodes} and {samples}"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE}, got {self.temperature}"
            )
        if samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_task of {samples} needs a temperature above 0: "
                f"the most probable tokens are always the same"
            )
        return self


class TrackingSection(Section):
    """Trackers that get the metrics of a run, besides the screen and metrics.jsonl."""

    # Any of `tensorboard`, `wandb`, `mlflow` and the trackers of
    # [other packages](guides/watching.md#trackers) together.
    trackers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # Project of Weights & Biases, or experiment of MLflow.
    project: Annotated[str, Field(min_length=1)] = "slipstream"
    # Address of the controller's /metrics. Rollout servers take the ports behind it. Off loopback
    # it needs TLS and `security.metrics_token_file`; servers without these answer on loopback.
    prometheus: Address | None = None

    @model_validator(mode="after")
    def _has_ports(self) -> Self:
        if self.prometheus is not None:
            port = address_parts(self.prometheus)[1]
            largest = 65535 - max(map(max, METRICS_PORTS.values()))
            if port > largest:
                raise ValueError(f"prometheus must have a port up to {largest}, got {port}")
        return self


class ProfileSection(Section):
    """A window of steps under torch's profiler: a Chrome trace of each rank in `RUN/profile`."""

    # First step of the window, counted from 1. Without it nothing is profiled.
    start_step: int | None = Field(None, ge=1)
    # Steps of the window. A trace has some hundred thousand lines for each.
    num_steps: Positive = 1


class DebugSection(Section):
    """Settings for tests, measurements and unusual devices, which no run needs."""

    # Record a window of steps.
    profile: ProfileSection = ProfileSection()
    # Continue after the end-of-text token up to the limits, for benchmarks.
    ignore_eos: bool = False


def tracker_named(name: str) -> EntryPoint:
    """Returns the place of a tracker of ours or of another package; raises ConfigError."""
    manifest = trackers().get(name)
    entries = [entry for entry in entry_points(group=TRACKERS) if entry.name == name]
    if manifest is not None:
        entries.append(EntryPoint(name, manifest.place, TRACKERS))
    if not entries:
        names = ", ".join(sorted({*trackers(), *entry_points(group=TRACKERS).names}))
        raise ConfigError(
            f"tracking.trackers has {name!r}, which no installed package gives as an entry point "
            f"of {TRACKERS}; there are {names}"
        )
    if len(entries) > 1:
        places = ", ".join(entry.value for entry in entries)
        raise ConfigError(
            f"tracking.trackers has {name!r}, which {len(entries)} trackers are called: {places}; "
            f"uninstall all but one of their packages"
        )
    return entries[0]


def check_trackers(tracking: TrackingSection) -> None:
    """Raises ConfigError with the command to run where a package or a login is missing."""
    manifests = trackers()
    for name in tracking.trackers:
        tracker_named(name)
        if name not in manifests:
            continue
        packages = manifests[name].packages
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.trackers has {name!r}, which needs the package {package}: "
                    f"pip install {shlex.join(packages.values())}"
                )
        if manifests[name].sign_in:
            resolve(manifests[name].sign_in)()
