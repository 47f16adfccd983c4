"""What `--dry-run` prints: the resolved settings, and the trainer's parallel groups."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.client.engine_checks import describe_engine
from slipstream.client.placement import (
    check_transport,
    describe_sharing,
    place_here,
    share_memory,
    uses_gpus,
)
from slipstream.protocol.access.security import without_password
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.config_file import check_sizes, dump_config, model_warnings
from slipstream.protocol.settings.model_sizes import read_model_sizes
from slipstream.protocol.settings.rank_layout import RankLayout
from slipstream.protocol.settings.roles import role_settings


def describe_dry_run(config: Config, *, ranks: int, servers: int = 0) -> str:
    """TOML that `load_config` reads back, but for a password; what is no setting is a comment.

    `ranks` and `servers` would start here. The model's config.json is read, nothing else of it.
    ConfigError as of `check_sizes`.
    """
    missing = check_sizes(config)
    config, gpus = place_dry(config, ranks=ranks, servers=servers)
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
    if config.algorithm.staleness_warning is not None:
        notes += ["", f"Warning: {config.algorithm.staleness_warning}"]
    for warning in model_warnings(config):
        notes += ["", f"Warning: {warning}"]
    if missing:
        notes += ["", "Only sizes were checked. Before a run can start:", *missing]
    return f"{dump_config(without_password(config))}\n{as_comments(notes)}"


def place_dry(config: Config, *, ranks: int = 0, servers: int = 0) -> tuple[Config, list[str]]:
    """Which GPU each process would have here, or why it does not fit: a dry run needs none.

    With the settings as sharing a GPU makes them.
    """
    engine = [describe_engine(config.rollout_server, on_cpu=not uses_gpus())] if servers else []
    try:
        placement = place_here(config, ranks=ranks, servers=servers)
        config = share_memory(config, placement)
        sharing = describe_sharing(config, placement)
        if ranks and servers:
            sharing.append(f"weights travel by {check_transport(config, placement)}")
    except ConfigError as error:
        return config, [f"The GPUs here do not fit: {error}", *engine]
    return config, ["The GPUs of what starts here:", *placement.describe(), *sharing, *engine]


def as_comments(notes: Sequence[str]) -> str:
    """Lines of TOML that say nothing to a program."""
    return "".join(f"# {note}".rstrip() + "\n" for note in notes)
