"""Checkpoints of the trainer: written during training, published by rename, loaded in any layout.

A save copies all tensors to main memory; a thread of each rank writes them to disk while training
continues. Between orders of the controller all ranks check together whether every thread is done;
then rank 0 publishes the folder. A crash before that leaves the older checkpoints unchanged. No
rank waits for a disk in a collective: see `disk_work`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.core.configuration.config_file import dump_config
from slipstream.core.errors import CheckpointError, ConfigError
from slipstream.core.machine.description import installed
from slipstream.core.machine.files import replace_file
from slipstream.core.run_folder import CHECKPOINTS
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork, check_shared
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.learner.trainer.checkpoints.stored_model import STATE_FOLDER, StoredModel
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol import checkpoints

if TYPE_CHECKING:
    from slipstream.learner.trainer.checkpoints.distributed_files import ThreadedSave

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads `models`; methods that read or write checkpoints are collective.

    Call `load_newest` first. `save` begins a save; `poll`, called between orders of the controller,
    publishes the save once it is written; `finish` waits for the save and publishes it.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        models: Sequence[StoredModel],
        *,
        adapters: dict[str, tuple[int, float]] | None = None,
    ) -> None:
        """Takes rank and alpha of clients' `adapters`, which a load changes."""
        self._config = config
        self._settings = config.checkpoint
        self._ranks = ranks
        self._models = tuple(models)
        self._adapters = {} if adapters is None else adapters
        self._folder = config.run_dir / CHECKPOINTS
        self._disk = DiskWork(self._folder, ranks)
        self._host = HostCopies(ranks.device)
        self._write: _Write | None = None
        self._last_step: int | None = None

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the settings demand a save of version `step` and it is not saved yet."""
        every = self._settings.every_steps
        is_its_turn = every > 0 and step > 0 and (is_last or step % every == 0)
        return is_its_turn and step != self._last_step

    def load_newest(self, *, removes_partial: bool = True) -> checkpoints.Manifest | None:
        """Loads the run's newest complete checkpoint; returns None if there is none.

        With `removes_partial` removes folders of interrupted saves. Raises CheckpointError when the
        checkpoint is damaged or has other models, or when checkpoints are enabled and the ranks do
        not share a folder.
        """

        def newest_step() -> bytes:
            removed = checkpoints.remove_partial(self._folder) if removes_partial else ()
            for name in removed:
                logger.warning("removed %s: its save was interrupted", self._folder / name)
            for path in checkpoints.passed_over(self._folder):
                logger.warning("%s is passed over: it is no whole checkpoint", path)
            steps = checkpoints.complete_steps(self._folder)
            return str(steps[-1]).encode() if steps else b""

        # An interrupted save may fill the disk, and the check writes a file: clean up first.
        newest = self._disk.on_main(newest_step)
        if self._settings.every_steps:
            check_shared(self._folder, self._ranks)
        step = self._ranks.broadcast_bytes(newest)
        return self.load(int(step)) if step else None

    def load(self, step: int, chosen: Sequence[StoredModel] = ()) -> checkpoints.Manifest:
        """Checks every file of version `step`'s checkpoint, loads it, and returns its manifest.

        With `chosen` models only these are loaded, each from that of its name in the checkpoint.
        Raises CheckpointError if a file is damaged or the checkpoint has other models, ConfigError
        if it was written by another optimizer, or by the other kind, distributed or plain.
        """
        from slipstream.learner.trainer.checkpoints.distributed_files import load_models

        path = checkpoints.checkpoint_path(self._folder, step)

        def check() -> checkpoints.Manifest:
            manifest = checkpoints.read_manifest(path)
            names = tuple(model.name for model in self._models)
            if manifest.models != names:
                raise CheckpointError(
                    f"{path} holds {', '.join(manifest.models)}, the run has {', '.join(names)}"
                )
            own_files = manifest.files[self._ranks.rank :: self._ranks.world_size]
            checkpoints.check_files(path, own_files, self._disk.moved)
            return manifest

        manifest = self._disk.together(check)
        kind = manifest.layout.distributed_optimizer
        trains = any(model.optimizer is not None for model in self._models)
        if trains and kind != self._layout().distributed_optimizer:
            raise ConfigError(
                f"learner.ddp.use_distributed_optimizer must be {str(kind).lower()} to go on from "
                f"{path}, which was written so, got {str(not kind).lower()} (by default it is true "
                "with several data parallel ranks)"
            )
        for name, ours in self._optimizers().items():
            theirs = manifest.optimizers.get(name, ours)
            if theirs != ours:
                section = name if name == "critic" else "learner"
                raise ConfigError(
                    f"{section}.optimizer.optimizer must be {theirs} to go on from {path}, which "
                    f"was written so, got {ours}"
                )
        models = chosen or self._models
        optimizers = [model.optimizer for model in models if model.optimizer is not None]
        # A checkpoint must not overwrite the settings of parameter groups.
        settings = [
            {name: value for name, value in group.items() if name not in ("params", "step")}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        load_models(models, path / STATE_FOLDER, self._disk)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, group_settings in zip(groups, settings, strict=True):
            group.update(group_settings)
        if chosen:
            return manifest
        self._adapters.update(manifest.adapters)
        if manifest.layout != self._layout():
            logger.info("%s was written in another layout: %s", path, manifest.layout)
        self._last_step = step
        return manifest

    def save(self, version: PolicyVersion, weight_digest: bytes) -> Saved | None:
        """Finishes the previous save and begins a new one, which a thread writes meanwhile.

        Returns the checkpoint of the previous save, on rank 0, else None; a version that is written
        already is that one. Raises CheckpointError if that save failed, or the new one cannot
        begin.
        """
        from slipstream.learner.trainer.checkpoints.distributed_files import begin_save

        path = checkpoints.checkpoint_path(self._folder, version.step)
        if version.step == self._last_step and self._write is None:
            return self._disk.on_main(lambda: Saved(checkpoints.read_manifest(path), path, 0.0))
        published = self.finish()
        if version.step == self._last_step:
            return published
        partial = path.with_name(path.name + checkpoints.PARTIAL_SUFFIX)

        def make_folder() -> None:
            if partial.exists():
                shutil.rmtree(partial)
            (partial / STATE_FOLDER).mkdir(parents=True)

        self._disk.on_main(make_folder)
        self._host.begin()
        pending = begin_save(self._models, partial / STATE_FOLDER, host=self._host, disk=self._disk)
        self._last_step = version.step
        # The rank's file is written in its thread, while training goes on.
        entries = self._disk.start(pending.write)
        adapters = dict(self._adapters)
        self._write = _Write(version, weight_digest.hex(), partial, pending, entries, adapters)
        return published

    def poll(self) -> Saved | None:
        """Publishes the current save if every rank has written its part; raises like `finish`."""
        if self._write is None:
            return None
        return self.finish() if self._disk.is_done(self._write.entries) else None

    def finish(self) -> Saved | None:
        """Waits for the current save, publishes it, and removes checkpoints that are too old.

        Returns the published checkpoint on rank 0, None on other ranks or if no save was in
        progress. Raises CheckpointError if the save failed.
        """
        write = self._write
        self._write = None
        if write is None:
            return None
        partial = write.partial
        settings = self._settings

        def describe_index() -> list[checkpoints.FileEntry]:
            # Rank 0's files other than its own part.
            state_files = (partial / STATE_FOLDER).iterdir()
            names = [
                f"{STATE_FOLDER}/{path.name}" for path in state_files if path.suffix != ".distcp"
            ]
            return [checkpoints.describe_file(partial, name, self._disk.moved) for name in names]

        def publish() -> Saved:
            files = [
                checkpoints.FileEntry(**entry) for part in entries for entry in json.loads(part)
            ]
            config_digest = hashlib.blake2b(dump_config(self._config).encode(), digest_size=16)
            manifest = checkpoints.Manifest(
                incarnation=write.version.incarnation,
                step=write.version.step,
                weight_digest=write.weight_digest,
                config_digest=config_digest.hexdigest(),
                layout=self._layout(),
                models=tuple(model.name for model in self._models),
                optimizers=self._optimizers(),
                adapters=write.adapters,
                packages=installed(("torch", "megatron-core")),
                saved_unix_s=time.time(),
                files=tuple(sorted(files, key=lambda file: file.path)),
            )
            # The manifest is the last file: a folder with a manifest is complete.
            data = manifest.model_dump_json(indent=1).encode()
            replace_file(partial / checkpoints.MANIFEST_NAME, data)
            path = checkpoints.publish_and_retain(
                partial, keep_last=settings.keep_last, keep_every=settings.keep_every
            )
            wall_s = time.monotonic() - write.started_s
            logger.info("checkpoint %s: %d bytes, %.2f s", path, manifest.num_bytes, wall_s)
            return Saved(manifest, path, wall_s)

        own_entries = self._disk.wait(write.entries)
        write.pending.finish()
        own_entries += self._disk.on_main(describe_index) or []
        encoded = json.dumps([entry.model_dump() for entry in own_entries]).encode()
        entries = self._ranks.gather_bytes(encoded)
        return self._disk.on_main(publish)

    def _optimizers(self) -> dict[str, str]:
        optimizers = {model.name: model.optimizer for model in self._models if model.optimizer}
        return {name: optimizer.config.optimizer for name, optimizer in optimizers.items()}

    def _layout(self) -> checkpoints.Layout:
        learner = self._config.learner
        sizes = learner.parallel
        return checkpoints.Layout(
            world_size=learner.world_size,
            distributed_optimizer=learner.use_distributed_optimizer,
            **sizes.model_dump() | {"etp": sizes.etp or sizes.tp},
        )


@dataclass(frozen=True)
class Saved:
    """A published checkpoint."""

    manifest: checkpoints.Manifest
    path: Path
    # Seconds from the copy of the tensors to the publication.
    wall_s: float


@dataclass(eq=False)
class _Write:
    version: PolicyVersion
    weight_digest: str
    partial: Path
    pending: ThreadedSave
    # The files that this rank's thread has written.
    entries: Future[list[checkpoints.FileEntry]]
    adapters: dict[str, tuple[int, float]]
    started_s: float = field(default_factory=time.monotonic)
