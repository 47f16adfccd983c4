"""Checks of the facts in a trainer's hello, and the lines that show them to people."""

from __future__ import annotations

from slipstream.core.types import PolicyVersion
from slipstream.v1 import trainer_pb2

# Largest number of lines of a trainer's layout that become events.
MAX_LAYOUT_LINES = 256


def impossible(hello: trainer_pb2.TrainerHello) -> str:
    """The reason why no Slipstream trainer would send this hello; empty: it is valid."""
    if hello.world_size < 1:
        return f"world_size of a trainer must be at least 1, got {hello.world_size}"
    if hello.num_senders > hello.world_size:
        return (
            f"num_senders of a trainer must be at most its world_size, got {hello.num_senders} "
            f"and {hello.world_size}"
        )
    if not hello.layout_description.strip():
        return "layout_description of a trainer must not be empty"
    return ""


def described(hello: trainer_pb2.TrainerHello) -> list[str]:
    """Returns the lines that tell people of a trainer's size and layout."""
    sizes, *groups = hello.layout_description.splitlines()
    first = f"the trainer has {hello.num_parameters:,} parameters {sizes}"
    return [first, *(f"  {line}" for line in groups[:MAX_LAYOUT_LINES])]


def came_out_different(version: PolicyVersion) -> str:
    """Returns the warning that a step which was trained again made another `version`."""
    return (
        f"step {version.step} came out different when it was trained again: "
        f"its weights are version {version} now, and are sent again"
    )


def saved(report: trainer_pb2.CheckpointReport) -> str:
    """Returns the line that tells people of a complete checkpoint."""
    return (
        f"checkpoint of version {report.version.step}: {report.num_bytes / 1e6:,.1f} MB, "
        f"{report.wall_s:.1f} s"
    )
