"""The output of `--dry-run`: the resolved settings, the trainer's parallel groups, what lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.client.launch.engine_checks import describe_engine, processor_problems
from slipstream.client.launch.placement import (
    check_transport,
    describe_sharing,
    place_here,
    share_memory,
    uses_gpus,
)
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
    """The result of a dry run whose settings are right."""

    # TOML that `load_config` reads back, but for a password; everything else is a comment.
    text: str
    # The changes that this machine needs before anything can start here.
    obstacles: tuple[str, ...]

    def show(self, check: Callable[[], None] | None = None) -> int:
        """Prints the text; returns 0 if everything could start, else SlipstreamError says why.

        `check` looks, after the text, at what the settings name: the run's folder and addresses.
        """
        say(self.text.rstrip("\n"))
        if check is not None:
            check()
        if self.obstacles:
            lacking = "; ".join(self.obstacles)
            raise SlipstreamError(f"the settings are right, but nothing can start here: {lacking}")
        return 0


def describe_dry_run(config: Config, *, ranks: int, servers: int = 0) -> DryRun:
    """Makes the dry run of a command that would start `ranks` ranks and `servers` servers here.

    It reads only config.json of the model. ConfigError as in `check_sizes`.
    """
    missing = check_sizes(config)
    config, gpus, misfit = place_dry(config, ranks=ranks, servers=servers)
    has_experts = read_model_sizes(config.model.path).experts > 0
    layout = RankLayout.of(config.learner.parallel, config.learner.world_size)
    notes = ["The trainer's ranks:", *layout.describe(has_experts=has_experts).splitlines()]
    for name, settings in role_settings(config).items():
        learner = settings.learner
        has_experts = read_model_sizes(settings.model.path).experts > 0
        own = RankLayout.of(learner.parallel, learner.world_size)
        notes += ["", f"The {name} in the same ranks:"]
        notes += own.describe(has_experts=has_experts).splitlines()
    notes += ["", *gpus]
    for warning in (*config.algorithms.staleness_warnings, *model_warnings(config)):
        notes += ["", f"Warning: {warning}"]
    if missing:
        notes += ["", "Only sizes were checked. Before a run can start:", *missing]
    # Servers that other commands start may have GPUs.
    lacking = processor_problems(config) if servers else ()
    return DryRun(_toml(config, notes), (*missing, *misfit, *lacking))


def describe_server(config: Config) -> DryRun:
    """Makes the dry run of the command that would start one rollout server here."""
    config, gpus, misfit = place_dry(config, ranks=0, servers=1)
    return DryRun(_toml(config, gpus), (*misfit, *processor_problems(config)))


def place_dry(
    config: Config, *, ranks: int, servers: int, gpus: tuple[Gpu, ...] | None = None
) -> tuple[Config, list[str], tuple[str, ...]]:
    """Returns the settings, the lines that say which process gets which GPU, and any misfit.

    The settings are those after sharing a GPU. A misfit is no error: a dry run needs no GPU.
    """
    engine = (
        [describe_engine(config.rollout_server, on_cpu=not (gpus or uses_gpus()))]
        if servers
        else []
    )
    try:
        placement = place_here(config, ranks=ranks, servers=servers, gpus=gpus)
        config = share_memory(config, placement)
        sharing = describe_sharing(config, placement)
        if ranks and servers:
            sharing.append(f"weights travel by {check_transport(config, placement)}")
    except ConfigError as error:
        return config, [f"The GPUs here do not fit: {error}", *engine], (str(error),)
    return config, ["The GPUs of what starts here:", *placement.describe(), *sharing, *engine], ()


def _toml(config: Config, notes: Sequence[str]) -> str:
    comments = "".join(f"# {note}".rstrip() + "\n" for note in notes)
    return f"{dump_config(without_password(config))}\n{comments}"
