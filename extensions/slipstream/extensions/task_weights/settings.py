"""The table of the functions that weigh tasks, and the rules for it."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, JsonValue
from slipstream.core.settings.section import Reference, Section
from slipstream.core.settings.tables import Tables

NAME = "task_weights"


class SamplerSection(Section):
    """The function that weighs the tasks of one environment."""

    # "module:function", in the folder in which the controller is started or on Python's path.
    function: Reference
    # Keyword arguments of the function.
    args: dict[str, JsonValue] = {}
    # Reward from which on an episode has passed.
    pass_reward: float = 1.0


class TaskWeightsSection(Section):
    """The functions that weigh tasks, by the names of environments that are trained."""

    environments: Annotated[dict[str, SamplerSection], Field(min_length=1)]


def section_of(config: Tables) -> TaskWeightsSection:
    """Returns the table; its values must be valid."""
    return config.table_of(NAME, TaskWeightsSection)


def setting_of(environment: str) -> str:
    """Returns the name of the table of one environment's function."""
    return f"extensions.{NAME}.environments.{environment}"


def own_functions(config: Tables) -> list[str]:
    """Returns the functions of the table, or none if its values are not valid."""
    table = config.extensions[NAME].get("environments")
    entries = table.values() if isinstance(table, dict) else ()
    functions = [entry.get("function") for entry in entries if isinstance(entry, dict)]
    return [function for function in functions if isinstance(function, str)]


def problems(config: Tables) -> Iterator[str]:
    """Yields a line for each setting that excludes the option, with the value and the rule."""
    table = config.extensions[NAME].get("environments")
    names = table if isinstance(table, dict) else {}
    if config.controller.client_loop:
        yield (
            f"extensions.{NAME} needs controller.client_loop = false: a client that decides what "
            "is sampled has no tasks, got true"
        )
    for evaluation in config.evaluations:
        if evaluation.name in names:
            yield (
                f"{setting_of(evaluation.name)} must be an environment that is trained, got an "
                "evaluation: its tasks are always the first ones"
            )
