"""Sections about what a run measures and where it writes that."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator
from slipstream.protocol.settings.section import Positive, Reference, Seconds, Section

# Between it and 0 vLLM samples at this one, without saying so to whoever asked.
MIN_TEMPERATURE = 0.01
# Above it vLLM refuses each request.
MAX_TEMPERATURE = 2.0


class EvaluationSection(Section):
    """One environment that is only measured, never trained."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # As for an environment.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Episodes of one round: all samples of all its tasks. Every round takes the same tasks with the
    # same seeds, none of them twice; fewer episodes, with a warning, if there are fewer tasks.
    num_episodes: Positive = 64
    # Episodes of each task; above 1 needs a temperature.
    samples_per_task: Positive = 1
    # Each k for which pass@k is reported: the chance that one of k replies passes. At most
    # `samples_per_task`.
    pass_at: tuple[Positive, ...] = (1,)
    # Smallest reward of a reply that passes.
    pass_reward: float = 1.0
    # Evaluate after every n-th step as well as before the first and after the last one; 0: only
    # these two. A round measures all evaluations, whichever asked for it.
    every_steps: int = Field(0, ge=0)
    # 0: the most probable token; else 0.01 or more.
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE)
    # None: sampling.top_p.
    top_p: float | None = Field(None, gt=0, le=1)
    # Sampled tokens of one reply. None: sampling.max_reply_tokens.
    max_reply_tokens: Positive | None = None
    # Limit of one reset or step.
    timeout_s: Seconds = 60.0
    # Worker processes beside each rollout server.
    num_workers: Positive = 1

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
    """Where the numbers of a run go beside the screen and metrics.jsonl."""

    # Any of these at once; for wandb and mlflow see docs/metrics.md.
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    # The project of Weights & Biases, the experiment of MLflow.
    project: Annotated[str, Field(min_length=1)] = "slipstream"
    # What the run is called there; None: run.name.
    name: str | None = None
    # offline: into the run's folder, for `wandb sync`.
    wandb_mode: Literal["online", "offline"] = "online"
    # Server or database of MLflow; None: MLFLOW_TRACKING_URI, and without it a file in the run's
    # folder.
    mlflow_uri: str | None = None


class ProfileSection(Section):
    """A window of steps under torch's profiler: a Chrome trace of each rank in `RUN/profile`."""

    # The first step of the window, counted from 1 as on the screen; none: nothing is profiled.
    start_step: int | None = Field(None, ge=1)
    # Steps of the window. A trace has some hundred thousand lines for each.
    num_steps: Positive = 1
    # Trainer ranks that are profiled.
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    # Also where in the source each operation was called.
    with_stack: bool = False
    # Also what each operation allocates.
    memory: bool = False
