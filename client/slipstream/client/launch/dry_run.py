"""The output of `--dry-run`: the resolved settings, the trainer's parallel groups, what lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.client.advice import profile_lines
from slipstream.client.launch.checks import Scene, Stage, require
from slipstream.client.launch.engine_checks import describe_engine, processor_problems
from slipstream.client.launch.placement import describe_sharing, fit_here, uses_gpus
from slipstream.client.terminal import say
from slipstream.core.configuration.config_file import check_sizes, dump_config, model_warnings
from slipstream.core.configuration.roles import role_settings
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.machine.gpus import Gpu
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.core.settings.rank_layout import RankLayout
from slipstream.protocol.access.security import without_password


@dataclass(frozen=True)
class DryRun:
    """The plan of a run whose settings are right."""

    # TOML that `load_config` reads back, but for a password; everything else is a comment.
    text: str
    # The changes that this machine needs before anything can start here.
    obstacles: tuple[str, ...]


async def show_dry_run(
    scene: Scene, *, ranks: int = 0, servers: int = 0, profile: Path | None = None
) -> int:
    """Prints the plan, then checks the run's folder and addresses.

    `profile`: the folder of an earlier run, whose measured times predict this one's.

    Returns 0 if everything could start here; raises SlipstreamError with the reasons otherwise.
    """
    predicted = [] if profile is None else profile_lines(scene.config, profile)
    plan = describe_dry_run(scene.config, ranks=ranks, servers=servers)
    say(plan.text.rstrip("\n"))
    if predicted:
        say("\n".join(f"# {line}" for line in ("", *predicted)))
    await require(scene, Stage.PLACE)
    if plan.obstacles:
        lacking = "; ".join(plan.obstacles)
        raise SlipstreamError(f"the settings are right, but nothing can start here: {lacking}")
    return 0


def describe_dry_run(config: Config, *, ranks: int = 0, servers: int = 0) -> DryRun:
    """Plans a command that would start `ranks` trainer ranks and `servers` rollout servers here.

    Reads only config.json of the model; raises ConfigError as `check_sizes` does.
    """
    missing = check_sizes(config)
    config, gpus, misfit = place_dry(config, ranks=ranks, servers=servers)
    notes = [*(_describe_ranks(config) if ranks else ()), *gpus]
    for warning in (*config.algorithms.staleness_warnings, *model_warnings(config)):
        notes += ["", f"Warning: {warning}"]
    if missing:
        notes += ["", "Only sizes were checked. Before a run can start:", *missing]
    # Servers that other commands start may have GPUs.
    lacking = processor_problems(config) if servers else ()
    comments = "".join(f"# {note}".rstrip() + "\n" for note in notes)
    text = f"{dump_config(without_password(config))}\n{comments}"
    return DryRun(text, (*missing, *misfit, *lacking))


def _describe_ranks(config: Config) -> Iterator[str]:
    models = {"The trainer's ranks:": config} | {
        f"The {name} in the same ranks:": role for name, role in role_settings(config).items()
    }
    for title, settings in models.items():
        has_experts = read_model_sizes(settings.model.path).experts > 0
        layout = RankLayout.of(settings.learner.parallel, settings.learner.world_size)
        yield from (title, *layout.describe(has_experts=has_experts).splitlines(), "")


def place_dry(
    config: Config, *, ranks: int, servers: int, gpus: tuple[Gpu, ...] | None = None
) -> tuple[Config, list[str], tuple[str, ...]]:
    """Returns the settings, the lines that say which process gets which GPU, and any misfit.

    The settings are those after sharing a GPU. A misfit is no error: a dry run needs no GPU.
    """
    on_cpu = not (gpus or uses_gpus())
    engine = [describe_engine(config.rollout_server, on_cpu=on_cpu)] if servers else []
    try:
        config, placement, transport = fit_here(config, ranks=ranks, servers=servers, gpus=gpus)
    except ConfigError as error:
        return config, [f"The GPUs here do not fit: {error}", *engine], (str(error),)
    sharing = describe_sharing(config, placement)
    if transport:
        sharing.append(f"weights travel by {transport}")
    return config, ["The GPUs of what starts here:", *placement.describe(), *sharing, *engine], ()
