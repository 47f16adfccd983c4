"""A model as it is stored in a checkpoint, and the starting weights of a run from such files."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from slipstream.core.errors import ConfigError
from slipstream.core.models.model_sizes import read_model_sizes
from slipstream.core.settings.config import Config
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.checkpoints.disk_work import DiskWork
from slipstream.learner.trainer.checkpoints.restricted_pickle import read_index
from slipstream.learner.trainer.model.policy import TOWER, Policy
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.checkpoints import MANIFEST_NAME, check_files, read_manifest
from torch.nn import Module

POLICY = "policy"
# Folder of Megatron's files in a checkpoint.
STATE_FOLDER = "state"


@dataclass(frozen=True)
class StoredModel:
    """A model of a checkpoint; `optimizer` is None for a model that is not trained.

    The policy's tensors have Megatron's names; tensors of other models are prefixed with `name`.
    """

    name: str
    chunks: Sequence[Megatron]
    optimizer: Megatron | None
    # Puts the model's layout in force, if it differs from the policy's.
    in_force: Callable[[], AbstractContextManager[None]] = nullcontext
    # The stored part: all of the model, all but adapters, or the adapter that `in_force` activates.
    content: Literal["all", "base", "adapter"] = "all"
    # Whether `chunks` are another model's, which have these values inside `in_force` alone.
    is_lent: bool = False

    def chosen(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries of a model chunk's `state` that are stored."""
        if self.content == "all":
            return state
        is_adapter = self.content == "adapter"
        return {name: part for name, part in state.items() if (".adapter." in name) == is_adapter}


class _StoredOnce:
    """A module as Megatron stores a chunk of a model: once, although every rank holds it."""

    def __init__(self, module: Module) -> None:
        self._state = module.state_dict
        self.load_state_dict = module.load_state_dict

    def sharded_state_dict(self, prefix: str = "", **_: object) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        rank = dist.get_rank()
        return {
            name: ShardedTensor.from_rank_offsets(f"{prefix}{name}", value, replica_id=rank)
            for name, value in self._state().items()
        }


def stored_policy(policy: Policy, *, with_optimizer: bool = True) -> list[StoredModel]:
    """Returns all that is published as stored models: the policy, and a layer that drafts.

    With named adapters the policy is the base model and each adapter.
    """
    chunks = policy.chunks
    optimizer = policy.optimizer if with_optimizer else None
    adapters = policy.adapters
    if not adapters.have_names:
        layer = policy.drafts
        drafts = [] if layer is None else [StoredModel("drafts", [_StoredOnce(layer)], None)]
        return [StoredModel(POLICY, chunks, optimizer), *drafts]
    return [
        StoredModel(POLICY, chunks, None, content="base"),
        *(stored_adapter(policy, name, name, optimizer) for name in adapters.names),
        *(
            StoredModel(
                f"served-{name}",
                chunks,
                None,
                in_force=partial(adapters.published, name),
                content="adapter",
            )
            for name in (adapters.names if adapters.are_clients else ())
        ),
    ]


def stored_adapter(
    policy: Policy, name: str, policy_adapter: str, optimizer: Megatron | None
) -> StoredModel:
    """Returns the adapter that a checkpoint has as `name`, for the policy's `policy_adapter`."""
    return StoredModel(
        f"adapter-{name}",
        policy.chunks,
        optimizer,
        in_force=partial(policy.adapters.active, policy_adapter),
        content="adapter",
    )


def check_saved(path: Path, ranks: Ranks) -> None:
    """Raises CheckpointError if a file of a checkpoint with a manifest has changed; collective."""
    if not (path / STATE_FOLDER).is_dir() and not (path / MANIFEST_NAME).exists():
        return
    disk = DiskWork(path, ranks)

    def check() -> None:
        own_files = read_manifest(path).files[ranks.rank :: ranks.world_size]
        check_files(path, own_files, disk.moved)

    disk.together(check)


def check_nothing_lost(config: Config, path: Path) -> None:
    """Raises ConfigError if the starting files hold adapters, or a tower that a run would lose.

    A model without adapters would load only the matrices. A model that sees no images would be
    trained and exported without the tower.
    """
    names = read_index(distributed_files_of(path) / ".metadata").state_dict_metadata
    if any(".adapter." in name for name in names):
        raise ConfigError(
            f"checkpoint.load must hold no adapters, those of {path} would be left out: "
            "`slipstream export` merges them into a folder for model.path"
        )
    sizes = read_model_sizes(config.model.path)
    has_tower = any(name.startswith(f"{TOWER}.") for name in names)
    if has_tower and not sizes.has_vision:
        raise ConfigError(
            f"checkpoint.load must hold no vision tower for a {sizes.architecture}, which sees no "
            f"images, that of {path} would be left out: model.path must be a folder with a tower"
        )


def distributed_files_of(path: Path) -> Path:
    """Returns the folder of the torch_dist files of a run's checkpoint, or `path` itself."""
    state = path / STATE_FOLDER
    return state if state.is_dir() else path
