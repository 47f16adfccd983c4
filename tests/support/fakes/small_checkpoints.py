"""Checkpoints without a model: one file of seven bytes and a manifest."""

import shutil
from pathlib import Path

from slipstream.protocol.checkpoints import (
    MANIFEST_NAME,
    Layout,
    Manifest,
    describe_file,
    publish_and_retain,
)

LAYOUT = Layout(
    world_size=1, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=1, distributed_optimizer=False
)


def written_checkpoint(folder: Path, step: int, *, weight_digest: str = "d") -> Path:
    """The whole folder of version `step`, not yet published."""
    partial = folder / f"step-{step:06d}.partial"
    # A kill may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "tensors").write_bytes(b"weights")
    manifest = Manifest(
        incarnation=0,
        step=step,
        weight_digest=weight_digest,
        config_digest="c",
        layout=LAYOUT,
        models=("policy",),
        packages={},
        saved_unix_s=1.0,
        files=(describe_file(partial, "tensors"),),
    )
    (partial / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1))
    return partial


def save_checkpoint(folder: Path, step: int, *, weight_digest: str = "d") -> Path:
    """The folder of version `step`, published as the trainer does it."""
    partial = written_checkpoint(folder, step, weight_digest=weight_digest)
    return publish_and_retain(partial, keep_last=100, keep_every=0)
