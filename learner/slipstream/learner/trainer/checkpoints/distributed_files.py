"""Saves and loads models and optimizers in Megatron's distributed checkpoint files (torch_dist).

Files of one layout of ranks can be read in any other. A save copies tensors to host memory, and a
thread of each rank writes them. Megatron's own writers fork, which threads of gRPC and OpenMP do
not survive, or start a second interpreter for each rank. Import this module after `cpu.install`.

The distributed optimizer and the plain one write other names and structures: `Checkpointer.load`
refuses a change between them.
"""

import contextlib
import dataclasses
import functools
import gc
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import state_dict_saver
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from slipstream.core.errors import CheckpointError
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.checkpoints.disk_work import CountedFile, DiskWork, SyncedFile
from slipstream.learner.trainer.checkpoints.host_copies import HostCopies
from slipstream.learner.trainer.checkpoints.restricted_pickle import read_index
from slipstream.learner.trainer.checkpoints.stored_model import (
    POLICY,
    StoredModel,
    distributed_files_of,
)
from slipstream.learner.trainer.model.model import unwrapped
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.protocol.checkpoints import FileEntry
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

# Options of Megatron: other sharding types fail to save, or to load in fp32, in this version. The
# last option makes only the first data-parallel rank save the optimizer's state.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_fully_reshardable_mem_efficient": True,
}
# Tensors that the distributed optimizer has for each parameter.
KEYS = ("param", "exp_avg", "exp_avg_sq")
# Most elements that all ranks together send at once.
PART_ELEMENTS = 64 << 20
# Key of the number of updates, which is stored with a model's own state.
_UPDATES = "updates"


def begin_save(
    models: Sequence[StoredModel], folder: Path, *, host: HostCopies, disk: DiskWork
) -> "ThreadedSave":
    """Plans a save into `folder`, which must exist and be empty; collective.

    The tensors may change as soon as this returns. Those on a device are copied to `host`: call
    `host.begin` before this, and not again before `finish`. `disk` counts the bytes that `write`
    writes. If one rank cannot plan, all raise CheckpointError.
    """
    save = ThreadedSave(host=host, disk=disk)
    state = sharded_states(models, host)
    for model in models:
        if model.optimizer is not None:
            # Megatron saves the number of updates of rank 0's optimizer, which may train nothing.
            with model.in_force():
                groups = model.optimizer.param_groups
                updates = max((group.get("step") or 0 for group in groups), default=0)
            num_updates = torch.tensor([float(updates)])
            state[model.name][_UPDATES] = int(disk.ranks.max(num_updates))
    try:
        dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=save,
            async_sharded_save=True,
            content_metadata=dict(_METADATA),
        )
    except CheckpointException as error:
        cause = first_cause(error)
        raise CheckpointError(f"the checkpoint could not be written: {cause}") from error
    return save


def load_models(models: Sequence[StoredModel], folder: Path, disk: DiskWork) -> None:
    """Loads weights and optimizer state in any layout, or raises CheckpointError; collective."""
    state = sharded_states(models)
    try:
        if not (folder / COMMON_STATE_FNAME).is_file():
            # Megatron would look elsewhere for it, by an index that can run code.
            raise CheckpointingException(f"{COMMON_STATE_FNAME} is missing")
        loaded = dist_checkpointing.load(
            state, str(folder), sharded_strategy=_SafeLoadStrategy(disk)
        )
    except (CheckpointingException, CheckpointException, KeyError, OSError) as error:
        raise CheckpointError(f"{folder} does not hold this model: {first_cause(error)}") from error
    for model in models:
        part = loaded[model.name]
        with model.in_force():
            for key, chunk in zip(_chunk_keys(model.chunks), model.chunks, strict=True):
                unwrapped(chunk).load_state_dict(part[key], strict=model.content == "all")
            if model.optimizer is not None:
                model.optimizer.load_state_dict(part["optimizer"])
                # Without the number of updates, a part of the optimizer that rank 0 lacks would
                # apply Adam's bias correction as in the first update.
                for group in model.optimizer.param_groups if part[_UPDATES] else ():
                    group["step"] = part[_UPDATES]


def load_starting_weights(models: Sequence[StoredModel], path: Path, ranks: Ranks) -> None:
    """Loads weights of a checkpoint or torch_dist files, or raises CheckpointError; collective."""
    files = distributed_files_of(path)
    load_models(models, files, DiskWork(files, ranks))


def sharded_states(models: Sequence[StoredModel], host: HostCopies | None = None) -> dict[str, Any]:
    """Returns each model's sharded state by name, with `host` for a save; collective."""
    states = {}
    for model in models:
        with model.in_force():
            keys = _chunk_keys(model.chunks)
            state: dict[str, Any] = {
                key: model.chosen(unwrapped(chunk).sharded_state_dict(metadata=dict(_METADATA)))
                for key, chunk in zip(keys, model.chunks, strict=True)
            }
            if model.optimizer is not None:
                of_chunks = state[keys[0]] if len(keys) == 1 else dict(state)
                with gathering(model.optimizer, host):
                    state["optimizer"] = model.optimizer.sharded_state_dict(
                        of_chunks, is_loading=host is None, metadata=dict(_METADATA)
                    )
                if host is not None:
                    # Megatron would warn of an entry that is None, as ranks differ.
                    optimizer_state = state["optimizer"]
                    for part in (
                        optimizer_state,
                        *(entry for entry in optimizer_state.values() if isinstance(entry, dict)),
                    ):
                        if part.get("param_state", optimizer_state) is None:
                            del part["param_state"]
            if model.content == "adapter" or model.is_lent:
                # Other values will be in the model when these tensors are used.
                detach(state, to_host=model.is_lent)
            if model.name != POLICY:
                add_prefix_for_sharding(state, f"{model.name}.")
            states[model.name] = state
    return states


def _chunk_keys(chunks: Sequence[Megatron]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]


class _CountedFiles(filesystem.FileSystem):
    """A file system that calls `moved` with the number of bytes of each read."""

    def __init__(self, moved: Callable[[int], None]) -> None:
        self._moved = moved

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with io.BufferedReader(CountedFile(Path(path), mode, self._moved)) as stream:
            yield stream


class _SafeReader(filesystem.FileSystemReader):
    def __init__(self, folder: Path, moved: Callable[[int], None]) -> None:
        super().__init__(folder)
        self.fs = _CountedFiles(moved)

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return read_index(Path(self.path) / ".metadata")


class _SafePlanner(torch_dist.MCoreLoadPlanner):  # type: ignore[misc]
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own planner would unpickle any object.
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


class _SafeLoadStrategy(torch_dist.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads like Megatron's strategy, but files cannot run code and ranks read independently."""

    def __init__(self, disk: DiskWork) -> None:
        super().__init__()
        self._disk = disk

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *_: object
    ) -> dict[str, Any]:
        tensors = [v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedTensor)]
        exact = [tensor for tensor in tensors if not tensor.allow_shape_mismatch]
        padded = {tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch}
        state, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        stored_tensors = torch_dist.mcore_to_pyt_state_dict(state, True)
        planner = _SafePlanner(
            shapes_validation_sharded_tensors=exact, allow_shape_mismatch_sharded_tensors=padded
        )
        reader = _SafeReader(checkpoint_dir, self._disk.moved)
        self._disk.together(lambda: _read(stored_tensors, reader, planner))
        loaded: dict[str, Any] = torch_dist._replace_sharded_keys_with_state_dict_keys(
            {
                key: torch_dist._unwrap_pyt_sharded_tensor(value)
                for key, value in stored_tensors.items()
            },
            flat,
            renamed,
        )
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded


@torch.no_grad()
def _read(tensors: dict[str, Any], reader: _SafeReader, planner: _SafePlanner) -> None:
    """Reads this rank's tensors, like torch's `load` but without the other ranks."""
    index = reader.read_metadata()
    planner.set_up_planner(tensors, index, is_coordinator=True)
    reader.set_up_storage_reader(index, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


class HostWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """Holds what one rank saves; Megatron calls all but `write` and, on rank 0, `write_index`."""

    def __init__(self, folder: Path, *, host: HostCopies, moved: Callable[[int], None]) -> None:
        """Takes `host` as in `begin_save`; `moved` gets the byte count of each write."""
        super().__init__(folder)
        self._host = host
        self._moved = moved
        self._items: list[tuple[Any, Any]] = []
        self._file_name = ""
        self._index: tuple[Metadata, list[list[WriteResult]]] | None = None
        self._results: list[WriteResult] | WRAPPED_EXCEPTION = []

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Keeps all data of the plan; copies tensors that training may change."""
        self._file_name = f"{plan.storage_data.prefix}0.distcp"
        tensors: list[Any] = [planner.resolve_data(item) for item in plan.items]
        tensors = [data.detach() if isinstance(data, Tensor) else data for data in tensors]
        copies = iter(self._host.copy([data for data in tensors if _is_on_device(data)]))
        for item, data in zip(plan.items, tensors, strict=True):
            data_to_write = data
            if _is_on_device(data):
                data_to_write = next(copies)
            elif isinstance(data, Tensor) and not self._host.holds(data):
                data_to_write = data.clone()
            self._items.append((item, data_to_write))

    def write(self) -> list[FileEntry]:
        """Writes and syncs the file; returns its entry, or [] if there is no file or it fails.

        A failure removes the file and is kept for `ThreadedSave.finish`.
        """
        items = self._items
        self._items = []
        if not items:
            return []
        path = Path(self.checkpoint_dir) / self._file_name
        try:
            with SyncedFile(path, self._moved) as file:
                form = filesystem.SerializationFormat.TORCH_SAVE
                results = []
                try:
                    for item, data in items:
                        if (
                            isinstance(data, Tensor)
                            and data.untyped_storage().size() != data.numel() * data.itemsize
                        ):
                            # torch would write the whole storage of a view.
                            data = data.clone()
                        results.append(
                            filesystem._write_item(
                                self.transforms, file, data, item, self._file_name, form
                            )
                        )
                except RuntimeError as error:
                    # torch raises its own error for a wrong position in the file; the disk's error
                    # is the cause.
                    raise (file.problem or error) from error
                os.fsync(file.fileno())
                self._results = results
                name = f"{path.parent.name}/{path.name}"
                return [FileEntry(path=name, num_bytes=file.tell(), digest=file.digest)]
        except Exception as error:  # noqa: BLE001 - `ThreadedSave.finish` raises it on all ranks
            self._results = _wrap_exception(error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return []

    def retrieve_write_results(self) -> list[WriteResult] | WRAPPED_EXCEPTION:
        """Returns each item's position in the file, or the error of `write`."""
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the index of all ranks' files on rank 0, until `write_index` writes it."""
        # The copy leaves out plans, which only a later save by Megatron would use.
        metadata_fields = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}
        self._index = type(metadata)(**metadata_fields), results

    def write_index(self) -> None:
        """Writes the index and the checkpoint's format, if this is rank 0; not collective."""
        if self._index is not None:
            super().finish(*self._index)
            save_config(CheckpointingConfig("torch_dist", 1), str(self.checkpoint_dir))


def _is_on_device(data: Any) -> bool:  # noqa: ANN401 - a tensor, or bytes
    return isinstance(data, Tensor) and data.device.type != "cpu"


class ThreadedSave(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A save like Megatron's strategy, but its writer neither forks nor starts a process.

    When Megatron has planned it, a thread of each rank calls `write`, then all ranks call `finish`.
    """

    def __init__(self, *, host: HostCopies, disk: DiskWork) -> None:
        super().__init__("torch_dist", 1)
        self._host = host
        self._disk = disk
        # On rank 0 the state other than tensors, as the bytes of its file.
        self._common: dict[Path, bytes] = {}

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *_: object
    ) -> AsyncRequest:
        """Plans the save with all ranks and passes the data to the writer; Megatron calls this."""
        # Megatron would read it with a pickle that can run code: a file of its own is read safely.
        common = sharded_state_dict.pop("common_state").data
        if dist.get_rank() == 0:
            encoded = io.BytesIO()
            torch.save(common, encoded)
            self._common[Path(checkpoint_dir) / COMMON_STATE_FNAME] = encoded.getvalue()
        state, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self._writer = HostWriter(checkpoint_dir, host=self._host, moved=self._disk.moved)
        self._plan, *_ = state_dict_saver.save_state_dict_async_plan(
            torch_dist.mcore_to_pyt_state_dict(state, False),
            self._writer,
            None,
            0,
            planner=torch_dist.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )
        # Megatron would write the format in a function of the request while the ranks wait.
        return AsyncRequest(self._writer.write, (), [])

    def write(self) -> list[FileEntry]:
        """Returns the result of `HostWriter.write`; after a failure `finish` raises on all ranks.

        Raises OSError if rank 0 cannot write the state that is not tensors.
        """
        for path, encoded in self._common.items():
            path.write_bytes(encoded)
        return self._writer.write()

    def finish(self) -> None:
        """Writes the index after all `write`; raises CheckpointError if one failed. Collective."""
        try:
            state_dict_saver.save_state_dict_async_finalize(*self._plan)
        except (Exception, CheckpointException) as error:
            cause = first_cause(error)
            raise CheckpointError(f"the checkpoint could not be written: {cause}") from error
        self._disk.together(self._writer.write_index)


def first_cause(error: BaseException) -> str:
    """Returns the first line of `error`, or the first failed rank's cause, if it is known here."""
    if not isinstance(error, CheckpointException):
        return str(error).partition("\n")[0]
    # torch reports the failures of all ranks to the first rank only.
    for rank, (failure, _) in error.failures.items():
        return f"{type(failure).__name__} on rank {rank}: {failure}"
    return "another rank failed"


@contextlib.contextmanager
def gathering(optimizer: Megatron, host: HostCopies | None) -> Iterator[None]:
    """Replaces, inside the block, Megatron's method that gathers the distributed optimizer's state.

    Megatron's method gathers through main memory and leaves the whole state on every rank. The
    replacement sends the state in small parts to the device of the first data-parallel rank, which
    copies the parts into `host`. For a load `host` is None: nothing is gathered, and every rank
    gets zeros, into which the state is loaded.
    """
    # The optimizer's parts whose state is split over data-parallel ranks.
    parts = [
        part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)
    ]
    # Megatron calls `gc.collect` at the end, which is fast because it skips frozen objects.
    gc.freeze()
    for part in parts:
        part.get_parameter_state_dp_zero = functools.partial(_gather, part, host)
    try:
        yield
    finally:
        gc.unfreeze()
        for part in parts:
            del part.get_parameter_state_dp_zero


def _gather(part: Megatron, host: HostCopies | None, **_: object) -> dict[Any, Any] | None:
    """Replaces `DistributedOptimizer.get_parameter_state_dp_zero`; see `gathering`."""
    group = part.data_parallel_group
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, ((dtype, ranges),) in enumerate(maps.items() for maps in part.gbuf_ranges):
        buffer = part.buffers[number]
        # Megatron looks for parameters at their places in the buffer, padding of buckets included.
        # Megatron's method leaves out the padding: behind the first padded bucket it would save the
        # state of other parameters.
        gathered: dict[str, Any] = {}
        if host is None:
            gathered = {key: torch.zeros(buffer.numel, device="cpu") for key in KEYS}
        else:
            if group.rank() == 0:
                gathered = {key: host.empty(buffer.numel, torch.float32) for key in KEYS}
            for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
                # The tensors of this rank's share of the bucket, with their begins and ends in it.
                places: list[tuple[int, int, dict[str, Tensor]]] = [
                    (
                        spans["gbuf_local"].start,
                        spans["gbuf_local"].end,
                        part._get_main_param_and_optimizer_states(parameter),
                    )
                    for parameter, spans in bucket_ranges["param_map"].items()
                ]
                for key in KEYS:
                    own_places = [
                        (a, b, states[key].detach().reshape(-1)) for a, b, states in places
                    ]
                    target = gathered[key][bucket.offset :] if gathered else None
                    _gather_bucket(own_places, bucket.grad_data, target, group)
        state[number] = {dtype: {**gathered, "numel_unpadded": buffer.numel_unpadded}}
    if host is None:
        return state
    host.wait()
    return state if group.rank() == 0 else None


def _gather_bucket(
    places: list[tuple[int, int, Tensor]],
    gradients: Tensor,
    target: Tensor | None,
    group: dist.ProcessGroup,
) -> None:
    """Gathers the shares of a bucket from all ranks into `target` on the first rank; collective."""
    size = group.size()
    share = gradients.numel() // group.size()
    part = max(1, min(share, PART_ELEMENTS // size))
    for begin in range(0, share, part):
        own_part = torch.empty(
            min(part, share - begin), dtype=torch.float32, device=gradients.device
        )
        end = begin + own_part.numel()
        for start, stop, tensor in places:
            first = max(start, begin)
            last = min(stop, end)
            if first < last:
                own_part[first - begin : last - begin].copy_(tensor[first - start : last - start])
        received: list[Tensor] | None = [own_part] if target is not None else None
        if size > 1:
            if target is not None:
                received = list(
                    torch.empty(size, own_part.numel(), device=own_part.device).unbind()
                )
            dist.gather(own_part, received, dst=dist.get_global_rank(group, 0), group=group)
        if target is not None:
            for rank, values in enumerate(received or ()):
                at = rank * share + begin
                target[at : at + own_part.numel()].copy_(values, non_blocking=True)


def detach(state: dict[str, Any], *, to_host: bool = False) -> None:
    """Replaces a state's tensors by copies, once the optimizer has made its own state of them.

    With `to_host` the copies take no memory of a GPU.
    """
    for part in nested_values(state):
        is_tensor = isinstance(part, (ShardedTensor, ShardedTensorFactory))
        if is_tensor and part.data is not None:
            device = torch.device("cpu") if to_host else part.data.device
            part.data = part.data.detach().to(device, copy=True)
