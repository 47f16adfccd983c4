"""Writes the policy as Hugging Face folders beside training, by `checkpoint.export_every`.

The tensors are gathered into main memory of rank 0, for which training stops; a thread of rank 0
writes them while training goes on. A folder has its name once it is whole. Consumes: the policy at
a due version. Produces: folders, and the newest whole one's version. Waits for: the writing thread,
before the next folder, before a newer checkpoint and at the end. Unblocked by: that thread, or the
limit of a silent disk.
"""

import json
import logging
import shutil
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.run_folder import EXPORT_VERSION, EXPORTS
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.weights.export import (
    AdapterTensors,
    HfFolderWriter,
    collected_adapters,
    hf_tensors,
    write_adapters,
)
from slipstream.learner.trainer.weights.run_chat import RunChat
from slipstream.protocol.checkpoints import PARTIAL_SUFFIX, remove_folder
from torch import Tensor

logger = logging.getLogger(__name__)

ADAPTERS = "-adapters"


@dataclass(frozen=True)
class _Folder:
    """What one folder is written from; only rank 0 has tensors."""

    path: Path
    description: bytes
    tensors: tuple[tuple[str, Tensor], ...]
    drafts: tuple[tuple[str, Tensor], ...]
    adapters: AdapterTensors


class PeriodicExport:
    """Writes folders of due versions; every method but `newest` is collective.

    All raise CheckpointError as `DiskWork.wait` does.
    """

    def __init__(self, config: Config, policy: Policy, chat: RunChat) -> None:
        self._config = config
        self._every_steps = config.checkpoint.export_every
        self._policy = policy
        self._ranks = policy.ranks
        self._chat = chat
        self._folder = config.run_dir / EXPORTS
        self._disk = DiskWork(self._folder, policy.ranks)
        self._writing: Future[None] | None = None
        self._version: int | None = None
        # The version of the newest folder that this process has written.
        self.newest: int | None = None

    def export(self, version: PolicyVersion, weight_digest: bytes) -> None:
        """Begins the folder of a due version, unless there is one of these weights."""
        step = version.step
        if not self._every_steps or step == 0 or step % self._every_steps:
            return
        self.finish()
        path = self._folder / f"step-{step:06d}"
        description = json.dumps(
            {
                "version": step,
                "incarnation": version.incarnation,
                "weight_digest": weight_digest.hex(),
            }
        ).encode()
        answer = self._disk.on_main(lambda: self._is_wanted(path, description))
        if self._ranks.broadcast_bytes(answer) != b"wanted":
            return
        folder = self._gathered(path, description)
        self._version = step
        is_main = self._ranks.is_main
        self._writing = self._disk.start(lambda: self._write(folder) if is_main else None)

    def _is_wanted(self, path: Path, description: bytes) -> bytes:
        """Removes what an interrupted start has left; b"wanted" without a whole folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for partial in path.parent.glob(f"*{PARTIAL_SUFFIX}"):
            shutil.rmtree(partial)
            logger.info("%s is removed, which an interrupted export has left", partial)
        for written in self._written(path):
            place = written / EXPORT_VERSION
            if not place.is_file() or place.read_bytes() != description:
                # It was written by a step that another one has made again, or not to its end.
                return b"wanted"
        return b"there"

    def _written(self, path: Path) -> list[Path]:
        """Returns the folders that one version has; the last one is written last."""
        adapters = path.with_name(f"{path.name}{ADAPTERS}")
        folders = [adapters] if self._config.lora.rank else []
        if not self._config.lora.adapters:
            folders.append(path)
        return folders

    def _gathered(self, path: Path, description: bytes) -> _Folder:
        """Copies the weights into main memory of rank 0."""
        config = self._config
        policy = self._policy
        tensors: list[tuple[str, Tensor]] = []
        drafts: list[tuple[str, Tensor]] = []
        if not config.lora.adapters:
            with policy.memory.resident(MemoryPart.PARAMETERS):
                for name, tensor in hf_tensors(policy, policy.dtype):
                    self._ranks.activity.note()
                    if self._ranks.is_main:
                        tensors.append((name, tensor.clone()))
            if policy.drafts is not None and self._ranks.is_main:
                for name, value in policy.drafts.named().items():
                    copy = value.detach().to("cpu", policy.dtype, copy=True)
                    drafts.append((name, copy))
        adapters: AdapterTensors = {}
        if config.lora.rank:
            adapters = collected_adapters(policy, config)
        return _Folder(
            path,
            description,
            tuple(tensors),
            tuple(drafts),
            adapters,
        )

    def _write(self, folder: _Folder) -> None:
        path = folder.path
        if self._config.lora.rank:
            write_adapters(
                folder.adapters,
                path.with_name(f"{path.name}{ADAPTERS}"),
                self._chat,
                self._disk.moved,
                description=folder.description,
            )
        if not self._config.lora.adapters:
            self._write_model(folder)
        self._remove_old()
        logger.info("version %s is exported to %s", self._version, self._folder)

    def _write_model(self, folder: _Folder) -> None:
        path = folder.path
        source = self._config.model.path
        partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
        writer = HfFolderWriter(partial, self._disk.moved)
        writer.begin(source, self._chat)
        for name, tensor in folder.tensors:
            if not writer.has_room(tensor):
                writer.flush()
            writer.add(name, tensor)
        writer.copy_untrained(source)
        layer = self._policy.drafts
        if layer is not None:
            writer.write_draft(layer, self._policy.dtype, dict(folder.drafts))
        (partial / EXPORT_VERSION).write_bytes(folder.description)
        dtype = str(self._policy.dtype).removeprefix("torch.")
        writer.finish(dtype, path)

    def _remove_old(self) -> None:
        """Removes the folders of all versions but the newest `checkpoint.keep_exports`."""
        folders = [path for path in self._folder.glob("step-*") if path.is_dir()]
        paths = [path for path in folders if not path.name.endswith(PARTIAL_SUFFIX)]
        names = {path.name.removesuffix(ADAPTERS) for path in paths}
        kept = sorted(names)[-self._config.checkpoint.keep_exports :]
        for path in paths:
            if path.name.removesuffix(ADAPTERS) not in kept:
                remove_folder(path)

    def poll(self) -> None:
        """Notes the folder under way if it is written."""
        if self._writing is not None and self._disk.is_done(self._writing):
            self.finish()

    def finish(self) -> None:
        """Waits for the folder under way."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            self._disk.wait(writing)
            self.newest = self._version
