"""Loads the starting weights of a run from distributed checkpoint files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_rules import sees_images
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.adapters.lora import TOWER
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.checkpoints.restricted_pickle import read_index
from slipstream.learner.trainer.checkpoints.stored_model import STATE_FOLDER, StoredModel
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.checkpoints import MANIFEST_NAME, check_files, read_manifest


def load_starting_weights(models: Sequence[StoredModel], path: Path, ranks: Ranks) -> None:
    """Loads weights from a run's checkpoint or other torch_dist files; collective.

    Raises CheckpointError if the files do not hold these models.
    """
    from slipstream.learner.trainer.checkpoints.distributed_files import load_models

    files = _distributed_files(path)
    load_models(models, files, DiskWork(files, ranks))


def check_saved(path: Path, ranks: Ranks) -> None:
    """Raises CheckpointError if a file of a run's checkpoint changed since its save; collective.

    Files from a converter have no manifest and are not checked.
    """
    if not (path / STATE_FOLDER).is_dir() and not (path / MANIFEST_NAME).exists():
        return
    disk = DiskWork(path, ranks)

    def check() -> None:
        own = read_manifest(path).files[ranks.rank :: ranks.world_size]
        check_files(path, own, disk.moved)

    disk.together(check)


def check_no_adapters(path: Path) -> None:
    """Raises ConfigError if the files for `load_starting_weights` hold low-rank adapters.

    A model without adapters would load only the matrices and lose the trained adapters.
    """
    if any(".adapter." in name for name in _names(path)):
        raise ConfigError(
            f"checkpoint.load must hold no adapters, those of {path} would be left out: "
            "`slipstream export` merges them into a folder for model.path"
        )


def check_no_lost_tower(config: Config, path: Path) -> None:
    """Raises ConfigError if the files hold a vision tower that a run of `config` would lose.

    A run that sees no images would train the decoder, and export it without the tower.
    """
    sizes = read_model_sizes(config.model.path)
    if sees_images(config, sizes):
        return
    if not any(name.startswith(f"{TOWER}.") for name in _names(path)):
        return
    if sizes.has_vision:
        raise ConfigError(
            f"sampling.max_images must be at least 1 with checkpoint.load = {path}, whose vision "
            "tower would be left out: `slipstream export` writes both into a folder for model.path"
        )
    raise ConfigError(
        f"checkpoint.load must hold no vision tower for a {sizes.folder_class}, which sees no "
        f"images, that of {path} would be left out: model.path must be a folder with a tower"
    )


def _names(path: Path) -> Iterable[str]:
    """Returns the names of all entries in the distributed checkpoint files of `path`."""
    names: Iterable[str] = read_index(_distributed_files(path) / ".metadata").state_dict_metadata
    return names


def _distributed_files(path: Path) -> Path:
    state = path / STATE_FOLDER
    return state if state.is_dir() else path
