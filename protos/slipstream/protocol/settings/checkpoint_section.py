"""The settings of checkpoints."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from slipstream.protocol.settings.section import Positive, Section


class CheckpointSection(Section):
    """From what a run goes on after a crash, and from what it starts."""

    # Write one after every n-th step, and one when the run ends; 0: none at all.
    every_steps: int = Field(50, ge=0)
    # Keep the newest n; older ones are removed when a newer one is complete.
    keep_last: Positive = 2
    # Keep every checkpoint whose version is a multiple of n, too; 0: no others.
    keep_every: int = Field(0, ge=0)
    # Copy to main memory and write beside training; otherwise training waits for the write.
    asynchronous: bool = True
    # Start from these weights: a folder of Megatron's distributed checkpoint files (torch_dist), in
    # any layout, of a run's checkpoint or of a conversion; `model.path` still gives shape and
    # tokenizer. None: from `model.path`.
    load: Path | None = None
    # Keep the recorded batches that a checkpoint covers: `slipstream replay` needs all of them.
    keep_batches: bool = True
