"""Checks that a configuration fits the engines, GPUs and disk of this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.client.launch.findings import Finding, Scene, advice, ok, problem
from slipstream.client.launch.machine import GIB
from slipstream.client.launch.placement import fit_here, uses_gpus
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_rules import cpu_engine_problems
from slipstream.core.settings.config import Config

# Room for settings, logs and the first steps of the journal, and for more.
LEAST_DISK_BYTES, MIN_DISK_GIB = 64 << 20, 5


def check_engine(scene: Scene) -> None:
    """Checks that engines of this machine can run the model with these settings."""
    if scene.has_model and not scene.dry_run:
        # A dry run lists such problems after its plan.
        for lack in processor_problems(scene.config):
            raise ConfigError(lack)


def processor_problems(config: Config) -> tuple[str, ...]:
    """Returns a line for each setting that needs engines on GPUs, or () if engines run on GPUs."""
    return () if uses_gpus() else tuple(cpu_engine_problems(config))


def check_fit(scene: Scene) -> Iterator[Finding]:
    """Yields findings on placement and transport of what starts on this machine."""
    try:
        _, placement, transport = fit_here(scene.config, scene.share)
    except ConfigError as error:
        yield problem(str(error), "ask for more GPUs, or name by --role what starts here")
        return
    yield ok("; ".join(placement.describe(scene.share.ranks)))
    if transport:
        yield ok(f"weights travel by {transport}", area="transport")


def check_disk(scene: Scene) -> Finding:
    """Checks the room for the run's checkpoints and its final export, in `run.dir`."""
    config, usual, least = scene.stated, 0, LEAST_DISK_BYTES
    run_dir = Path("runs") if config is None else config.run.dir
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    try:
        # Permissions do not show root that a mount is read-only.
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError:
        seen = f"run.dir is {run_dir}, and {place} cannot be written"
        return problem(seen, "set run.dir to a folder of yours")
    if config is not None:
        weights = sum(file.stat().st_size for file in config.model.path.glob("*.safetensors"))
        # A checkpoint has two moments of each weight and, of 16 bits, a master, with 4 bytes each.
        saved = weights * (3 if config.model.dtype == "float32" else 7)
        once = (weights if config.lora.rank else saved) * (config.checkpoint.every_steps > 0)
        final = weights * config.learner.export_final
        # A new checkpoint is complete before an old one is removed.
        usual, least = (config.checkpoint.keep_last + 1) * once + final, max(least, once, final)
    free = shutil.disk_usage(place).free
    seen = f"{free / GIB:.2f} GiB are free for {run_dir}"
    if usual:
        seen += f"; checkpoints take {usual / GIB:.2f} GiB"
    if free < least:
        return problem(seen, "make room, or set run.dir to a folder on another disk")
    if free < max(usual, MIN_DISK_GIB * GIB):
        return advice(seen, "checkpoints and the journal grow: set run.dir elsewhere")
    return ok(seen)
