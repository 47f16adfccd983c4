"""Checks before a run that main memory has room for the weights of the versions that are kept."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.fit import needs_of
from slipstream.client.launch.machine import GIB
from slipstream.client.launch.scene import LEARNER, Finding, Scene, advice, ok, problem
from slipstream.core.errors import ConfigError
from slipstream.core.machine.description import free_memory
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.protocol.checkpoints import checkpoint_path, complete_steps, read_manifest

REMEDY = "lower algorithm.max_staleness, or spread the ranks over more machines"


def check_copies(scene: Scene) -> Finding | None:
    """Checks the memory for copies of the weights of the ranks that start here."""
    config = scene.stated
    needs = None if config is None else needs_of(config)
    if config is None or needs is None:
        # The check of the model tells what is missing.
        return None
    num_versions = config.algorithm.max_staleness + 1
    if config.lora.rank:
        return ok(f"the adapters of {num_versions} versions are kept in main memory")
    num_ranks = len(scene.share.ranks)
    copies_bytes = num_ranks * num_versions * needs.weight_bytes
    free, memory = free_memory()
    seen = (
        f"the weights of {num_versions} versions are kept in main memory: "
        f"{num_versions * needs.weight_bytes / 1e6:,.1f} MB for each trainer rank, {num_ranks} here"
    )
    copies = f"{copies_bytes / GIB:.2f} GiB"
    if copies_bytes > memory:
        return problem(f"{seen} take {copies}, and the machine has {memory / GIB:.2f}", REMEDY)
    if copies_bytes > free:
        return advice(f"{seen} take {copies}, and {free / GIB:.2f} are free", REMEDY)
    return ok(seen)


def check_checkpoint(scene: Scene) -> None:
    """Checks that the newest checkpoint of the run has the earlier versions that are needed."""
    config = scene.config
    folder = config.run_dir / CHECKPOINTS
    steps = complete_steps(folder)
    if not steps:
        return
    path = checkpoint_path(folder, steps[-1])
    models = read_manifest(path).models
    num_adapters = max(1, len(config.lora.adapters))
    num_versions = sum("earlier-" in name for name in models) // num_adapters
    max_staleness = config.algorithm.max_staleness
    if num_versions != max_staleness:
        raise ConfigError(
            f"algorithm.weight = 'split' needs the weights of {max_staleness} earlier versions, as "
            f"algorithm.max_staleness is {max_staleness}, and {path} has {num_versions}: go on "
            "with the settings of the run's start"
        )


CHECKS = (
    Check(
        "checkpoint",
        Stage.PLACE,
        LEARNER,
        check_checkpoint,
        after="disk",
    ),
    Check(
        "earlier versions",
        Stage.SETTINGS,
        LEARNER,
        check_copies,
        of_machine=True,
        is_told=True,
        after="for Megatron",
    ),
)
