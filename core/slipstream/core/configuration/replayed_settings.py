"""The settings that a replay may change: recorded batches must not depend on them.

Both tables say what is allowed. A new setting is refused until it is entered here.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from slipstream.core.configuration.config_file import NEAR
from slipstream.core.errors import ConfigError, did_you_mean, near_names
from slipstream.core.extension import active, is_of_training
from slipstream.core.settings.config import Config, is_below
from slipstream.core.settings.role_sections import teacher_setting

# Settings by which a recorded batch is trained. A replay trains with both values, side by side.
TRAINING = (
    "algorithm.advantage",
    "algorithm.advantage_args",
    "algorithm.aggregation",
    "algorithm.decay",
    "algorithm.entropy_coefficient",
    "algorithm.epochs",
    "algorithm.kl",
    "algorithm.learning_rate",
    "algorithm.leave_out_truncated",
    "algorithm.loss",
    "algorithm.loss_args",
    "algorithm.mini_batches",
    "algorithm.reward",
    "algorithm.reward_args",
    "algorithm.warmup_steps",
    "algorithm.weight",
    "algorithm.weight_args",
    "learner.grad_clip",
    "learner.weight_decay",
    "run.steps",
)
# Places of the run's files here, and how ranks share the work: weights differ by rounding at most.
PLACES = (
    "checkpoint.load",
    "critic.parallel",
    "critic.path",
    "learner.ddp",
    "learner.devices",
    "learner.master",
    "learner.micro_batch_tokens",
    "learner.offload",
    "learner.parallel",
    "learner.ranks_per_node",
    "learner.shared_prefix_tokens",
    "learner.threads",
    "learner.timeout_s",
    "learner.transformer",
    "learner.world_size",
    "model.dtype",
    "model.path",
    "reference.path",
)
# The folders of teachers, whose tables have names of the user's.
TEACHER_PATHS = f"{teacher_setting('*')}.path"
# Settings by which episodes were sampled, judged and put into batches.
_SAMPLING = (
    "algorithm.agreement",
    "algorithm.filter",
    "algorithm.filter_args",
    "algorithm.group_size",
    "algorithm.groups_per_step",
    "algorithm.max_staleness",
    "algorithm.router_replay",
    "environments",
    "rollout_server",
    "run.seed",
    "sampling",
)


def places_and_training(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides of `PLACES`, and those of `TRAINING`.

    A function that is named begins with its default arguments. Raises ConfigError for an override
    of any other setting.
    """
    places: list[str] = []
    training: list[str] = []
    # Arguments of another function are no longer those that the run recorded.
    defaults: list[str] = []
    for override in overrides:
        name = override.partition("=")[0].strip().removeprefix("--")
        if is_below(name, PLACES) or fnmatchcase(name, TEACHER_PATHS):
            places.append(override)
        elif is_below(name, TRAINING) or is_of_training(name):
            training.append(override)
            if f"{name}_args" in TRAINING:
                defaults.append(f"{name}_args={{}}")
        else:
            raise ConfigError(refusal(name))
    return places, [*defaults, *training]


def refusal(name: str) -> str:
    """Returns why a replay cannot change the setting `name`, which neither table has."""
    if is_below(name, _SAMPLING):
        cause = "the recorded batches were made with it, and others would have come of another"
    elif any(is_below(allowed, (name,)) for allowed in (*TRAINING, *PLACES)):
        cause = f"it is a whole table: name its settings one by one, such as {name}.KEY=VALUE"
    else:
        near = near_names(name, (*TRAINING, *PLACES), cutoff=NEAR)
        hint = f"; {did_you_mean(near)}" if near else ""
        cause = f"it is none of those by which a recorded batch is trained{hint}"
    return (
        f"{name} cannot be another in a replay: {cause}; guides/debugging.md lists those that can"
    )


def comparison_problems(original: Config, changed: Config) -> Iterator[str]:
    """Yields why recorded batches cannot be trained with `changed` settings beside the `original`.

    Both have the same `PLACES`.
    """
    yield from trial_problems(original)
    algorithm = original.algorithm
    for name in ("reward", "reward_args", "leave_out_truncated"):
        if algorithm.filter != "none" and getattr(algorithm, name) != getattr(
            changed.algorithm, name
        ):
            yield (
                f"algorithm.{name} cannot be another in a replay of a run with algorithm.filter = "
                f"{algorithm.filter!r}, which chose the recorded groups by it"
            )
    if algorithm.reads_versions != changed.algorithm.reads_versions:
        yield (
            f"algorithm.weight cannot be {changed.algorithm.weight!r} beside the run's "
            f"{algorithm.weight!r}: only one of them needs the weights of earlier versions, and "
            "both lines begin with the same state"
        )


def trial_problems(config: Config) -> Iterator[str]:
    """Yields why steps of a run cannot be trained in several ways in one process."""
    if config.controller.client_loop:
        yield "a client's own loop made the steps of this run: no setting or group decides on them"
    if len(config.lora.adapters) > 1:
        adapters = ", ".join(config.lora.adapters)
        yield f"lora.adapters must be at most one for this, got {adapters}"
    for manifest in active(config):
        if not manifest.allows_trials:
            table = ", ".join(manifest.tables)
            yield f"a run with the table {table} cannot: the state of its layer is in no checkpoint"
