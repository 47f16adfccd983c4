"""Checkpoints of the trainer: written beside training, published by rename, loaded in any layout.

A save copies all tensors to main memory; a thread of each rank writes them while training goes on.
Between orders all ranks look together whether every thread is done, and rank 0 publishes the folder
then: a crash before that leaves the checkpoints as they were.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from safetensors.torch import load_file
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.learner.trainer.checkpoints.shared_folder import check_shared
from slipstream.learner.trainer.checkpoints.stored_model import STATE_FOLDER, StoredModel
from slipstream.learner.trainer.model.settings import Megatron
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.tensor_files import save_tensors
from slipstream.protocol.checkpoints import (
    PARTIAL_SUFFIX,
    FileEntry,
    Layout,
    Manifest,
    check_files,
    checkpoint_path,
    complete_steps,
    describe_file,
    publish_and_retain,
    read_manifest,
    remove_partial,
    write_manifest,
)
from slipstream.protocol.errors import CheckpointError
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.config_file import dump_config
from slipstream.protocol.types import PolicyVersion
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.learner.trainer.checkpoints.distributed_files import PendingSave

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published."""

    manifest: Manifest
    path: Path
    # From the copy of the tensors to the publication.
    wall_s: float


@dataclass(eq=False)
class _Write:
    """A save under way on this rank."""

    version: PolicyVersion
    weight_digest: str
    partial: Path
    pending: PendingSave
    thread: threading.Thread | None = None
    # What the thread wrote, or why it cannot say.
    entries: list[FileEntry] | OSError | None = None
    started_s: float = field(default_factory=time.monotonic)


class Checkpointer:
    """Saves and loads `models`; every method is collective."""

    def __init__(self, config: Config, ranks: Ranks, models: Sequence[StoredModel]) -> None:
        self._config = config
        self._settings = config.checkpoint
        self._ranks = ranks
        self._models = tuple(models)
        self._folder = config.run_dir / "checkpoints"
        self._host = HostCopies(ranks.device)
        self._write: _Write | None = None
        self._last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the version `step` is one to save."""
        every = self._settings.every_steps
        return every > 0 and step % every == 0 and step != self._last_step

    def is_wanted_at_the_end(self, step: int) -> bool:
        """Whether a run that ends with version `step` needs one more."""
        return self._settings.every_steps > 0 and step > 0 and step != self._last_step

    def load_newest(self) -> Manifest | None:
        """Loads the newest whole checkpoint of the run; None when there is none.

        Removes what an interrupted save left. CheckpointError when the checkpoint is damaged or of
        other models, or when there are to be checkpoints and the ranks share no folder for them.
        """
        from slipstream.learner.trainer.checkpoints.distributed_files import saved_sizes

        if self._settings.every_steps:
            check_shared(self._folder, self._ranks)
        chosen = b""
        if self._ranks.is_main:
            for name in remove_partial(self._folder):
                logger.warning("removed %s: its save was interrupted", self._folder / name)
            steps = complete_steps(self._folder)
            chosen = str(steps[-1]).encode() if steps else b""
        step = self._ranks.broadcast_bytes(chosen if self._ranks.is_main else None)
        loaded = self.load(int(step)) if step else None
        if self._settings.every_steps and self._ranks.device.type == "cuda":
            self._host.reserve(saved_sizes(self._models))
        return loaded

    def load(self, step: int) -> Manifest:
        """Loads the checkpoint of version `step`, checked file by file."""
        from slipstream.learner.trainer.checkpoints.distributed_files import load_models

        path = checkpoint_path(self._folder, step)
        manifest = self._together(lambda: self._check(path))
        settings = [_optimizer_settings(model.optimizer) for model in self._models]
        load_models(self._models, path / STATE_FOLDER)
        for model, values in zip(self._models, settings, strict=True):
            _restore_settings(model.optimizer, values)
        if manifest.layout == self._layout():
            _set_random_state(load_file(path / _random_name(self._ranks.rank)))
        else:
            logger.info("%s was written in another layout: %s", path, manifest.layout)
        self._last_step = step
        return manifest

    def save(self, version: PolicyVersion, weight_digest: bytes) -> Saved | None:
        """Begins a save, after the one before it is complete; finishes it unless asynchronous.

        Returns what was published meanwhile.
        """
        from slipstream.learner.trainer.checkpoints.distributed_files import begin_save

        published = self.finish()
        partial = checkpoint_path(self._folder, version.step)
        partial = partial.with_name(partial.name + PARTIAL_SUFFIX)
        self._together(lambda: self._prepare(partial))
        self._together(self._host.begin)
        pending = begin_save(
            self._models,
            partial / STATE_FOLDER,
            copy=self._settings.asynchronous,
            host=self._host,
        )
        save_tensors(_random_state(), partial / _random_name(self._ranks.rank))
        self._last_step = version.step
        self._write = _Write(version, weight_digest.hex(), partial, pending)
        self._write.thread = threading.Thread(
            target=_write_files,
            args=(self._write, self._ranks.rank),
            name="checkpoint",
            daemon=True,
        )
        self._write.thread.start()
        return published if self._settings.asynchronous else self.finish()

    def poll(self) -> Saved | None:
        """Publishes the save under way if every rank has written its part."""
        if self._write is None:
            return None
        assert self._write.thread is not None
        is_writing = torch.tensor([float(self._write.thread.is_alive())])
        return None if float(self._ranks.max(is_writing)) else self.finish()

    def finish(self) -> Saved | None:
        """Waits for the save under way, publishes it, and removes what is not kept any more."""
        write, self._write = self._write, None
        if write is None:
            return None
        assert write.thread is not None
        write.thread.join()
        write.pending.finish()
        own = self._together(lambda: self._describe_own(write))
        entries = self._ranks.gather_bytes(own)
        return self._together(lambda: self._publish(write, entries))

    def _check(self, path: Path) -> Manifest:
        manifest = read_manifest(path)
        names = tuple(model.name for model in self._models)
        if manifest.models != names:
            raise CheckpointError(
                f"{path} holds {', '.join(manifest.models)}, the run has {', '.join(names)}"
            )
        check_files(path, manifest.files[self._ranks.rank :: self._ranks.world_size])
        return manifest

    def _prepare(self, partial: Path) -> None:
        if self._ranks.is_main:
            if partial.exists():
                shutil.rmtree(partial)
            (partial / STATE_FOLDER).mkdir(parents=True)

    def _describe_own(self, write: _Write) -> bytes:
        """The entries of the files that this rank wrote; rank 0 also wrote the index."""
        if isinstance(write.entries, OSError):
            raise write.entries
        entries = write.entries
        assert entries is not None, "the thread that writes a checkpoint died"
        if self._ranks.is_main:
            state = write.partial / STATE_FOLDER
            paths = [path for path in state.iterdir() if path.suffix != ".distcp"]
            entries = entries + _described(write.partial, paths)
        return json.dumps([entry.model_dump() for entry in entries]).encode()

    def _publish(self, write: _Write, entries: list[bytes]) -> Saved | None:
        if not self._ranks.is_main:
            return None
        files = [FileEntry(**entry) for part in entries for entry in json.loads(part)]
        config_digest = hashlib.blake2b(dump_config(self._config).encode(), digest_size=16)
        manifest = Manifest(
            incarnation=write.version.incarnation,
            step=write.version.step,
            weight_digest=write.weight_digest,
            config_digest=config_digest.hexdigest(),
            layout=self._layout(),
            models=tuple(model.name for model in self._models),
            packages={
                name: importlib.metadata.version(name) for name in ("torch", "megatron-core")
            },
            saved_unix_s=time.time(),
            files=tuple(sorted(files, key=lambda file: file.path)),
        )
        write_manifest(write.partial, manifest)
        settings = self._settings
        path = publish_and_retain(
            write.partial, keep_last=settings.keep_last, keep_every=settings.keep_every
        )
        wall_s = time.monotonic() - write.started_s
        logger.info("checkpoint %s: %d bytes, %.2f s", path, manifest.num_bytes, wall_s)
        return Saved(manifest, path, wall_s)

    def _together(self, act: Callable[[], Result]) -> Result:
        """What `act` returns; when it fails on one rank, CheckpointError on all."""
        problem: CheckpointError | OSError | None = None
        try:
            result = act()
        except (CheckpointError, OSError) as error:
            problem = error
        failed = float(self._ranks.max(torch.tensor([float(problem is not None)])))
        if isinstance(problem, CheckpointError):
            raise problem
        if problem is not None:
            raise CheckpointError(f"the checkpoint failed: {problem}") from problem
        if failed:
            raise CheckpointError("the checkpoint failed on another rank")
        return result

    def _layout(self) -> Layout:
        learner = self._config.learner
        sizes = learner.parallel
        return Layout(
            world_size=learner.world_size,
            tp=sizes.tp,
            pp=sizes.pp,
            vpp=sizes.vpp,
            cp=sizes.cp,
            ep=sizes.ep,
            etp=sizes.etp or sizes.tp,
            distributed_optimizer=learner.use_distributed_optimizer,
        )


def _write_files(write: _Write, rank: int) -> None:
    """What a thread does beside training."""
    written = write.pending.write()
    try:
        write.entries = [*written, *_described(write.partial, [write.partial / _random_name(rank)])]
    except OSError as error:
        write.entries = error


def _described(partial: Path, paths: Sequence[Path]) -> list[FileEntry]:
    return [describe_file(partial, str(path.relative_to(partial))) for path in paths]


def _optimizer_settings(optimizer: Megatron | None) -> list[dict[str, object]]:
    """What the configuration says of each parameter group: a checkpoint must not bring it back."""
    if optimizer is None:
        return []
    return [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def _restore_settings(optimizer: Megatron | None, settings: list[dict[str, object]]) -> None:
    if optimizer is not None:
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def _random_state() -> dict[str, Tensor]:
    """The states of this rank's generators."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracked = get_cuda_rng_tracker().get_states()
    states = {f"tracked.{name}": state.cpu() for name, state in tracked.items()}
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state().cpu(), **states}


def _set_random_state(states: dict[str, Tensor]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    prefix = "tracked."
    tracked = {
        name.removeprefix(prefix): state
        for name, state in states.items()
        if name.startswith(prefix)
    }
    get_cuda_rng_tracker().set_states(tracked)
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state(states["cuda"])
