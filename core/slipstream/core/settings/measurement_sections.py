"""The sections on evaluation, tracking and profiling."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator
from slipstream.core.errors import ConfigError
from slipstream.core.machine.address import address_parts, is_loopback
from slipstream.core.settings.section import Address, Positive, Reference, Seconds, Section
from slipstream.core.template_values import TemplateValues

# Modules of each tracker, with the requirements that have them.
PACKAGES: dict[str, dict[str, str]] = {
    "tensorboard": {},
    "wandb": {"wandb": "wandb>=0.20,<1"},
    "mlflow": {
        "mlflow": "mlflow-skinny>=3.17,<4",
        "sqlalchemy": "sqlalchemy>=2,<3",
        "alembic": "alembic>=1.14,<2",
    },
}


# Between 0 and this temperature vLLM silently samples at this temperature.
MIN_TEMPERATURE = 0.01
# vLLM refuses requests above this temperature.
MAX_TEMPERATURE = 2.0
# Distance of a process's port from that in tracking.prometheus. Several rollout servers of one host
# take the first free ports of theirs.
METRICS_PORTS = {"controller": range(1), "trainer": range(1, 2), "rollout_server": range(2, 130)}


class PlayedSection(Section):
    """An environment: what is played in the episodes, and by which processes."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # "package.module:Class"; the controller's working directory is searched first.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Limit of one reset or step of the environment.
    timeout_s: Seconds = 60.0
    # Worker processes next to each rollout server.
    num_workers: Positive = 1
    # Passed by name to the chat template for this environment, before those of
    # rollout_server.chat_template_kwargs.
    chat_template_kwargs: TemplateValues = {}
    # Interpreter of the workers, such as that of an environment of `python -m venv` with other
    # versions of packages. By default the rollout server's own.
    python: Path | None = None
    # The one of lora.adapters that samples its episodes and learns from them, if the run has any.
    adapter: str | None = None


class EvaluationSection(PlayedSection):
    """One environment that is only evaluated, never trained on."""

    # Episodes of one round: all samples of all its tasks. Every round takes the same tasks with the
    # same seeds. With fewer tasks a round has fewer episodes.
    num_episodes: Positive = 64
    # Episodes of each task; a number above 1 needs a temperature above 0.
    samples_per_task: Positive = 1
    # Each k for which pass@k is reported: the chance that one of k replies passes. At most
    # `samples_per_task`.
    pass_at: tuple[Positive, ...] = (1,)
    # Smallest reward of a reply that passes.
    pass_reward: float = 1.0
    # Evaluate after every n-th step (0: none), and always before the first and after the last. A
    # round that is due for one evaluation measures all.
    every_steps: int = Field(0, ge=0)
    # Sampling temperature, 0.01 or more; 0: always the most probable token.
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    # Like sampling.top_p, which is the default.
    top_p: float | None = Field(None, gt=0, le=1)
    # Most sampled tokens of one reply; by default sampling.max_reply_tokens.
    max_reply_tokens: Positive | None = None

    @model_validator(mode="after")
    def _samples(self) -> EvaluationSection:
        samples = self.samples_per_task
        if self.num_episodes % samples:
            raise ValueError(
                f"num_episodes must be a multiple of samples_per_task, "
                f"got {self.num_episodes} and {samples}"
            )
        if max(self.pass_at, default=1) > samples:
            raise ValueError(
                f"pass_at must be at most samples_per_task, got {max(self.pass_at)} and {samples}"
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

    # Any of these together; for wandb and mlflow see docs/guides/watching.md.
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    # The project of Weights & Biases, the experiment of MLflow.
    project: Annotated[str, Field(min_length=1)] = "slipstream"
    # Address at which Prometheus reads the controller's /metrics; unset: no process listens. The
    # trainer takes the next port, each rollout server the first free one behind that; with port 0
    # all take any free ones. Off loopback this needs TLS and security.metrics_token_file.
    prometheus: Address | None = None
    # URL of a collector of OpenTelemetry that gets a trace of each group, step and publish, by OTLP
    # over HTTP: "http://127.0.0.1:4318/v1/traces". Off loopback it must be https.
    traces_url: str | None = None

    @field_validator("traces_url")
    @classmethod
    def _is_collector(cls, url: str | None) -> str | None:
        if url is None:
            return url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ValueError("traces_url must be http(s)://host:port/path without a user")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError(f"traces_url must be https, {parts.hostname} is not loopback")
        return url

    @model_validator(mode="after")
    def _has_ports(self) -> TrackingSection:
        if self.prometheus is not None:
            port = address_parts(self.prometheus)[1]
            largest = 65535 - max(map(max, METRICS_PORTS.values()))
            if port > largest:
                raise ValueError(f"prometheus must have a port up to {largest}, got {port}")
        return self


class ProfileSection(Section):
    """A window of steps under torch's profiler: a Chrome trace of each rank in `RUN/profile`."""

    # First step of the window, counted from 1 as on the screen. Without it nothing is profiled.
    start_step: int | None = Field(None, ge=1)
    # Steps of the window. A trace has some hundred thousand lines for each step.
    num_steps: Positive = 1
    # Trainer ranks that are profiled.
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    # Also record where in the source each operation was called.
    with_stack: bool = False
    # Also record the memory that each operation allocates.
    memory: bool = False


class DebugSection(Section):
    """Settings for tests, measurements and strange devices: no run needs one of them."""

    # Record a window of steps.
    profile: ProfileSection = ProfileSection()
    # Control experiment: permute the rewards of a batch at random, so that nothing can be learnt.
    shuffle_rewards: bool = False
    # Share of a rank's GPU memory that the logits of one micro batch's trained tokens may take. If
    # they need more, the backward pass computes them a second time, in chunks.
    kept_logits_share: float = Field(0.08, ge=0, le=1)
    # Dense bfloat16 TFLOP/s of one rank's device, for the metric mfu; else the known value for
    # A100, H100, H200 and B200.
    peak_tflops: float | None = Field(None, gt=0)
    # Steps for which new prompts may wait until there is one for every 32 replies under way, so
    # that most steps are one CUDA graph. By default 32 on GPUs with CUDA graphs, 0 elsewhere.
    prompt_wait_steps: int | None = Field(None, ge=0)
    # Largest gap of a probe, in nats: the typical error of a logit, estimated from
    # log-probabilities. Default: 1e-3 with model.dtype float32, 0.16 with bfloat16, where rounding
    # alone gives 0.06, 0.02 with float16; 0.5 with engines in FP8.
    probe_tolerance: float | None = Field(None, gt=0)
    # Continue after the end-of-text token, up to the limits: for benchmarks.
    ignore_eos: bool = False
    # Element type of the logits in both; model: the same as `dtype`. Learner and engine round
    # logits in half precision differently, so that their log-probabilities differ more.
    head_dtype: Literal["float32", "model"] = "float32"


def check_trackers(tracking: TrackingSection) -> None:
    """Raises ConfigError with the command to run when a tracker's package is not installed."""
    for tracker in tracking.trackers:
        for package in PACKAGES[tracker]:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"tracking.trackers has {tracker!r}, which needs the package {package}: "
                    f"pip install {shlex.join(PACKAGES[tracker].values())}"
                )
