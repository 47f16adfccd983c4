"""What `--dry-run` prints: the resolved settings, and the trainer's parallel groups."""

from __future__ import annotations

from slipstream.protocol.config import Config
from slipstream.protocol.config_file import check_sizes, dump_config
from slipstream.protocol.model_sizes import read_model_sizes
from slipstream.protocol.rank_layout import RankLayout
from slipstream.protocol.roles import role_settings


def describe_dry_run(config: Config) -> str:
    """TOML that `load_config` reads back; all that is no setting stands in comments.

    The model's config.json is read, nothing else of it. ConfigError as of `check_sizes`.
    """
    missing = check_sizes(config)
    has_experts = read_model_sizes(config.model.path).experts > 0
    layout = RankLayout.of(config.learner.parallel, config.learner.world_size)
    notes = ["The trainer's ranks:", *layout.describe(has_experts=has_experts).splitlines()]
    for name, settings in role_settings(config).items():
        learner = settings.learner
        has_experts = read_model_sizes(settings.model.path).experts > 0
        own = RankLayout.of(learner.parallel, learner.world_size)
        notes += ["", f"The {name} in the same ranks:"]
        notes += own.describe(has_experts=has_experts).splitlines()
    if config.algorithm.staleness_warning is not None:
        notes += ["", f"Warning: {config.algorithm.staleness_warning}"]
    if missing:
        notes += ["", "Only sizes were checked. Before a run can start:", *missing]
    lines = "\n".join(f"# {note}".rstrip() for note in notes)
    return f"{dump_config(config)}\n{lines}\n"
