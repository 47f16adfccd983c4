"""Writes a folder of the Hugging Face form, one file of bounded size after the other."""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from slipstream.core.models.model_files import held_tensors, is_further
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.models.registry import TOWERS
from slipstream.learner.trainer.checkpoints.files import write_safetensors
from slipstream.protocol.checkpoints import sync_folder
from torch import Tensor

MAX_SHARD_BYTES = 4 << 30
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")


class HfFolderWriter:
    """Writes a folder in safetensors files of bounded size, so that only one is in memory.

    Call `begin`, then `add` for each tensor, with a `flush` before a tensor that has no room, then
    `finish`. A disk that fails meanwhile leaves nothing of the folder.
    """

    def __init__(
        self, folder: Path, moved: Callable[[int], None], *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Calls `moved` with the number of bytes after each write."""
        self._folder, self._moved = folder, moved
        self._max_shard_bytes = max_shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self._forgotten = {"torch_dtype"}
        self._total_bytes = 0

    def begin(self, source: Path) -> None:
        """Makes the folder and copies everything of `source` into it except its weights."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        with self._removed_on_failure():
            shutil.copytree(source, self._folder, ignore=shutil.ignore_patterns(*_WEIGHT_FILES))

    def forget(self, field: str) -> None:
        """Takes a field out of config.json."""
        self._forgotten.add(field)

    def has_room(self, tensor: Tensor) -> bool:
        """Whether the file that is being filled has room for this tensor too."""
        fits = self._waiting_bytes + tensor.nbytes <= self._max_shard_bytes
        return fits or not self._waiting

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor for the next file."""
        self._waiting[name] = tensor
        self._waiting_bytes += tensor.nbytes

    def copy_untrained(self, source: Path) -> None:
        """Copies the tensors of `source` that are not trained, unchanged."""
        layers = read_model_sizes(source).layers
        written = {*self._waiting, *itertools.chain.from_iterable(self._shards)}
        for name, (path, _) in held_tensors(source).items():
            # Layers that predict further tokens, and towers that a run leaves out.
            is_untrained = name.startswith(TOWERS) or is_further(name, layers=layers)
            if name in written or not is_untrained:
                continue
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
            if not self.has_room(tensor):
                self.flush()
            self.add(name, tensor)

    def finish(self, dtype: str, target: Path) -> None:
        """Writes the last file and the index, and sets the element type in config.json.

        The folder then replaces `target`.
        """
        self.flush()
        number = len(self._shards)
        names = (
            ["model.safetensors"]
            if number == 1
            else [f"model-{place:05}-of-{number:05}.safetensors" for place in range(1, number + 1)]
        )
        for place, name in enumerate(names):
            self._shard_path(place).rename(self._folder / name)
        if number > 1:
            where = {
                tensor: name
                for name, shard in zip(names, self._shards, strict=True)
                for tensor in shard
            }
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2))
        settings = self._folder / "config.json"
        values = json.loads(settings.read_text())
        values = {name: value for name, value in values.items() if name not in self._forgotten}
        values["dtype"] = dtype
        settings.write_text(json.dumps(values, indent=2))
        if target.exists():
            shutil.rmtree(target)
        self._folder.rename(target)
        sync_folder(target.parent)

    def flush(self) -> None:
        """Writes all tensors that wait into one file."""
        with self._removed_on_failure():
            write_safetensors(self._shard_path(len(self._shards)), self._waiting, self._moved)
        self._shards.append(list(self._waiting))
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    @contextlib.contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        """Removes the folder when the disk fails: what lies there would keep a full disk full."""
        try:
            yield
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _shard_path(self, place: int) -> Path:
        return self._folder / f"shard-{place}.safetensors"
