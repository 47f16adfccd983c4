"""Checks before a run that main memory has room for the weights of the versions that are kept."""

from slipstream.client.launch.check import Check, Stage
from slipstream.client.launch.findings import LEARNER, Finding, Scene, advice, ok, problem
from slipstream.client.launch.fit import needs_of
from slipstream.client.launch.machine import GIB
from slipstream.core.machine.description import free_memory

REMEDY = "lower algorithm.max_staleness, or spread the ranks over more machines"


def check_copies(scene: Scene) -> Finding | None:
    """Checks the memory for copies of the weights of the ranks that start here."""
    config = scene.config
    needs = needs_of(config)
    if needs is None:
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
        f"{num_versions * needs.weight_bytes / 1e6:,.1f} MB for each of {num_ranks} trainer ranks "
        f"here, {copies_bytes / GIB:.2f} GiB"
    )
    if copies_bytes > memory:
        return problem(f"{seen}, and the machine has {memory / GIB:.2f} GiB", REMEDY)
    if copies_bytes > free:
        return advice(f"{seen}, and {free / GIB:.2f} GiB are free", REMEDY)
    return ok(seen)


CHECKS = (
    Check(
        "earlier versions",
        Stage.PLACE,
        LEARNER,
        check_copies,
        is_told=True,
        after="batches",
    ),
)
