"""The settings of checkpoints."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from slipstream.core.settings.section import Positive, Section


class CheckpointSection(Section):
    """Checkpoints, from which a run continues after a crash, and starting weights."""

    # Write a checkpoint after every n-th step, and one when the run ends; 0: none at all.
    every_steps: int = Field(50, ge=0)
    # Keep the newest n checkpoints; older ones are removed when a newer one is complete.
    keep_last: Positive = 2
    # Also keep every checkpoint whose version is a multiple of n; 0: keep no others.
    keep_every: int = Field(0, ge=0)
    # Copy to main memory and write during training; if false, training waits for the write.
    asynchronous: bool = True
    # Start from these weights: a folder of Megatron's distributed checkpoint files (torch_dist) in
    # any layout, from a run's checkpoint or a conversion. `model.path` still gives shape and
    # tokenizer. None: start from the weights of `model.path`.
    load: Path | None = None
    # Keep the recorded batches that a checkpoint covers: `slipstream replay` needs all of them.
    keep_batches: bool = True
