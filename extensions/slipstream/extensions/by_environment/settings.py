"""The table of what differs between environments, and the rules for it."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, JsonValue, ValidationError
from slipstream.core.environment_rules import EnvironmentRules
from slipstream.core.extension import active
from slipstream.core.settings.algorithm_section import AlgorithmSection, Arguments, is_own
from slipstream.core.settings.measurement_sections import MAX_TEMPERATURE, MIN_TEMPERATURE
from slipstream.core.settings.role_sections import teacher_setting
from slipstream.core.settings.section import Positive, Section
from slipstream.core.settings.table_rules import group_size_problems, trajectory_problems
from slipstream.core.settings.tables import Tables

NAME = "by_environment"
# Settings of an entry that are settings of `algorithm`, too.
OF_ESTIMATOR = frozenset({"advantage", "advantage_args"})
OF_OBJECTIVE = frozenset({"loss", "loss_args"})


class EnvironmentOverrides(Section):
    """What differs for the episodes of one environment; what is left out is the run's."""

    # Factor of the loss of each token.
    loss_weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    # Episodes of one task, in place of `algorithm.group_size`.
    group_size: Positive | None = None
    # Temperature of its sampling and of the learner's logits, in place of `sampling.temperature`.
    temperature: float | None = Field(None, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    # Built-in estimator of a token's advantage, in place of `algorithm.advantage`.
    advantage: str | None = None
    # Its arguments; those of the run's estimator if `advantage` is left out.
    advantage_args: Arguments = {}
    # Built-in objective of a token, in place of `algorithm.loss`.
    loss: str | None = None
    # Arguments of the loss, such as the clip range; for the run's loss if `loss` is left out.
    loss_args: Arguments = {}
    # Factor of the divergence from the reference model, in place of `algorithm.kl.coefficient`.
    kl_coefficient: float | None = Field(None, ge=0, allow_inf_nan=False)


class ByEnvironmentSection(Section):
    """What differs, by the names of environments that are trained."""

    environments: Annotated[dict[str, EnvironmentOverrides], Field(min_length=1)]


def section_of(config: Tables) -> ByEnvironmentSection:
    """Returns the table; its values must be valid."""
    return config.table_of(NAME, ByEnvironmentSection)


def setting_of(environment: str) -> str:
    """Returns the name of the table of one environment."""
    return f"extensions.{NAME}.environments.{environment}"


def rules_of(config: Tables) -> dict[str, EnvironmentRules]:
    """Returns the rules of each environment in the table, by name; all settings must be valid."""
    rules: dict[str, EnvironmentRules] = {}
    for name, entry in section_of(config).environments.items():
        algorithm = None
        if entry.model_fields_set & OF_ESTIMATOR:
            algorithm = _algorithm(config, entry)
        objective = None
        if entry.model_fields_set & OF_OBJECTIVE:
            objective = _algorithm(config, entry)
        rules[name] = EnvironmentRules(
            loss_weight=entry.loss_weight,
            kl_coefficient=entry.kl_coefficient,
            temperature=entry.temperature,
            algorithm=algorithm,
            objective=objective,
        )
    return rules


def group_sizes_in(table: Mapping[str, JsonValue]) -> dict[str, int]:
    """Returns the sizes of groups of environments that have their own; raises ValidationError."""
    section = ByEnvironmentSection.model_validate(table)
    sizes: dict[str, int] = {}
    for name, entry in section.environments.items():
        if entry.group_size is not None:
            sizes[name] = entry.group_size
    return sizes


def _algorithm(config: Tables, entry: EnvironmentOverrides) -> AlgorithmSection:
    """Returns the run's algorithm with the entry's functions; raises ValidationError."""
    table = config.algorithm.model_dump(exclude_unset=True)
    if entry.group_size is not None:
        table["group_size"] = entry.group_size
    if entry.advantage is not None:
        table["advantage"] = entry.advantage
    if entry.model_fields_set & OF_ESTIMATOR:
        table["advantage_args"] = entry.advantage_args
    if entry.loss is not None:
        table["loss"] = entry.loss
    if entry.model_fields_set & OF_OBJECTIVE:
        table["loss_args"] = entry.loss_args
    if entry.kl_coefficient is not None:
        table["kl"] = {**table.get("kl", {}), "coefficient": entry.kl_coefficient}
    return AlgorithmSection.model_validate(table)


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    try:
        entries = section_of(config).environments
    except ValidationError:
        # The check of the table tells which value is wrong.
        return
    evaluations = {evaluation.name for evaluation in config.evaluations}
    for name, entry in entries.items():
        setting = setting_of(name)
        if name in evaluations:
            yield (
                f"{setting} must be an environment that is trained, got an evaluation: it has no "
                "loss"
            )
        if not entry.model_fields_set:
            yield f"{setting} must name what differs for the environment, got an empty table"
        if entry.group_size is not None:
            name_of_size = f"{setting}.group_size"
            yield from group_size_problems(config, entry.group_size, name_of_size)
            num_bytes = config.trajectory_bytes()
            yield from trajectory_problems(config, num_bytes, group_size=entry.group_size)
        if entry.temperature is not None:
            yield from _temperature_problems(config, name, entry.temperature)
        if entry.kl_coefficient is not None and not config.algorithm.kl.coefficient:
            yield (
                f"{setting}.kl_coefficient needs algorithm.kl.coefficient > 0: without it a run "
                f"has no divergence, got {entry.kl_coefficient:g}"
            )
        problems_of_functions: list[str] = []
        if entry.model_fields_set & OF_ESTIMATOR:
            problems_of_functions += _estimator_problems(config, setting, entry)
        if entry.model_fields_set & OF_OBJECTIVE:
            problems_of_functions += _objective_problems(config, setting, entry)
        yield from problems_of_functions
        if not problems_of_functions:
            yield from _algorithm_problems(config, setting, entry)


def _temperature_problems(config: Tables, name: str, temperature: float) -> Iterator[str]:
    setting = setting_of(name)
    reference = config.reference
    server = None if reference is None else reference.server_of(name)
    if reference is not None and server is not None and temperature != 1.0:
        teacher = reference.teacher_of(name)
        place = teacher_setting(teacher) if teacher else "reference"
        yield (
            f"{setting}.temperature must be 1 with {place}.server: vLLM gives the "
            f"log-probabilities of prompts at temperature 1, got {temperature:g}"
        )
    if config.algorithm.agreement == "bits" and temperature != 1.0:
        yield (
            f"{setting}.temperature must be 1 with algorithm.agreement = 'bits': the engine "
            f"divides logits in a kernel of its own, got {temperature:g}"
        )
    run_temperature = config.sampling.temperature
    for manifest in active(config):
        # A layer that is trained beside the model learns what is sampled at one temperature.
        if manifest.parameters_beside_model and temperature != run_temperature:
            yield (
                f"{setting}.temperature must be sampling.temperature = {run_temperature:g} with "
                f"{manifest.title or manifest.name}, whose layer is trained at one, got "
                f"{temperature:g}"
            )


def _estimator_problems(config: Tables, setting: str, entry: EnvironmentOverrides) -> Iterator[str]:
    advantage = entry.advantage or config.algorithm.advantage
    if config.critic is not None:
        yield (
            f"{setting} excludes the table critic: the critic learns the returns of one estimator "
            f"for all episodes, got advantage = {advantage!r}"
        )
    elif is_own(advantage):
        yield (
            f"{setting}.advantage must be a built-in estimator, got {advantage!r}: a function of "
            "your own in algorithm.advantage gets the episodes of all environments"
        )


def _objective_problems(config: Tables, setting: str, entry: EnvironmentOverrides) -> Iterator[str]:
    loss = entry.loss or config.algorithm.loss
    if is_own(loss):
        yield (
            f"{setting}.loss must be a built-in loss, got {loss!r}: a function of your own in "
            "algorithm.loss gets the tokens of all environments"
        )


def _algorithm_problems(config: Tables, setting: str, entry: EnvironmentOverrides) -> Iterator[str]:
    try:
        algorithm = _algorithm(config, entry)
    except ValidationError as error:
        for fault in error.errors():
            message = fault["msg"].removeprefix("Value error, ")
            yield f"{setting}: {message}"
        return
    estimator = algorithm.estimator
    if entry.advantage is not None and estimator is not None and estimator.critic == "needed":
        yield f"{setting}.advantage = {algorithm.advantage!r} needs a critic, which it excludes"
    if config.sampling.cuts and not config.replays_sampling:
        new_ratios = algorithm.behavior_ratios.keys() - config.algorithm.behavior_ratios.keys()
        for ratio in sorted(new_ratios):
            yield (
                f"{setting}: {ratio} would compare unlike probabilities where "
                f"{' and '.join(config.sampling.cuts)} leave out tokens and no cut is replayed"
            )
    computes_in_fp8 = config.rollout_server.computes_in_fp8 or config.learner.computes_in_fp8
    if computes_in_fp8 and config.algorithm.corrects and not algorithm.corrects:
        yield (
            f"{setting}.loss_args.ratio must be 'behavior' in FP8, where algorithm.weight = 'none' "
            "corrects nothing, got 'proximal'"
        )
