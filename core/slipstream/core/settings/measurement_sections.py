"""The sections on evaluation, tracking and profiling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator
from slipstream.core.settings.section import Positive, Reference, Seconds, Section
from slipstream.core.template_values import TemplateValues

# Between 0 and this temperature vLLM silently samples at this temperature.
MIN_TEMPERATURE = 0.01
# vLLM refuses requests above this temperature.
MAX_TEMPERATURE = 2.0


class EvaluationSection(Section):
    """One environment that is only evaluated, never trained on."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # "package.module:Class", like the reference of an environment.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Episodes of one round: all samples of all its tasks. Every round takes the same tasks with the
    # same seeds, each task once. If there are fewer tasks, a round has fewer episodes, and the run
    # logs a warning.
    num_episodes: Positive = 64
    # Episodes of each task; a number above 1 needs a temperature above 0.
    samples_per_task: Positive = 1
    # Each k for which pass@k is reported: the chance that one of k replies passes. At most
    # `samples_per_task`.
    pass_at: tuple[Positive, ...] = (1,)
    # Smallest reward of a reply that passes.
    pass_reward: float = 1.0
    # Evaluate after every n-th step, before the first step and after the last one; 0: only before
    # the first and after the last step. A round that is due for one evaluation measures all.
    every_steps: int = Field(0, ge=0)
    # Sampling temperature, 0.01 or more; 0: always the most probable token.
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    # Like sampling.top_p; None: the value of sampling.top_p.
    top_p: float | None = Field(None, gt=0, le=1)
    # Most sampled tokens of one reply. None: sampling.max_reply_tokens.
    max_reply_tokens: Positive | None = None
    # Limit of one reset or step of the environment.
    timeout_s: Seconds = 60.0
    # Worker processes beside each rollout server.
    num_workers: Positive = 1
    # Passed by name to the chat template, like those of an environment.
    chat_template_kwargs: TemplateValues = {}
    # Interpreter of the workers, like the python of an environment.
    python: Path | None = None
    # The one of lora.adapters that is measured. None: the run has no lora.adapters.
    adapter: str | None = None

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
    """Trackers that get the metrics of a run, beside the screen and metrics.jsonl."""

    # Any of these together; for wandb and mlflow see docs/guides/watching.md.
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    # The project of Weights & Biases, the experiment of MLflow.
    project: Annotated[str, Field(min_length=1)] = "slipstream"
    # Name of the run in the trackers; None: run.name.
    name: str | None = None
    # offline: write into the run's folder, for `wandb sync`.
    wandb_mode: Literal["online", "offline"] = "online"
    # Server or database of MLflow; None: the variable MLFLOW_TRACKING_URI, or a file in the run's
    # folder if that is not set.
    mlflow_uri: str | None = None


class ProfileSection(Section):
    """A window of steps under torch's profiler: a Chrome trace of each rank in `RUN/profile`."""

    # First step of the window, counted from 1 as on the screen; None: nothing is profiled.
    start_step: int | None = Field(None, ge=1)
    # Steps of the window. A trace has some hundred thousand lines for each step.
    num_steps: Positive = 1
    # Trainer ranks that are profiled.
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    # Also record where in the source each operation was called.
    with_stack: bool = False
    # Also record the memory that each operation allocates.
    memory: bool = False
