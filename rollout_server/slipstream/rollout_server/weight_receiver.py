"""The engine workers' side of a publish: a weight-transfer engine for vLLM's registry.

vLLM imports this module in every worker (`worker_extension_cls`); importing it registers the
engine. Consumes: buckets from the learner. Produces: a loaded model, one digest for each bucket.
Waits for: the communicator and each bucket. Unblocked by: the bytes, or the deadline of that wait.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from slipstream.protocol.buckets import Bucket, TensorSpec, plan_buckets, tensors_from_pb
from slipstream.protocol.digests import bucket_digest, bucket_tensor_digests
from slipstream.protocol.errors import WeightSyncError
from slipstream.v1 import weights_pb2
from torch._C import _distributed_c10d as c10d
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "slipstream"


@dataclass
class JoinInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """How a worker joins a communicator; times in seconds."""

    transport: str
    communicator_id: str
    store_host: str
    store_port: int
    first_rank: int
    world_size: int
    join_deadline_s: float

    @classmethod
    def of(cls, order: weights_pb2.PublishOrder, first_rank: int) -> JoinInfo:
        """What an order says of its communicator; `first_rank` is that of the engine's worker 0."""
        communicator = order.communicator
        return cls(
            transport=communicator.transport,
            communicator_id=communicator.communicator_id,
            store_host=communicator.store_host,
            store_port=communicator.store_port,
            first_rank=first_rank,
            world_size=communicator.world_size,
            join_deadline_s=order.join_deadline_s,
        )


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What arrives, in order: (name, element type, shape, rank of its sender).

    `abandon` only clears a failed update.
    """

    communicator_id: str = ""
    tensors: list[tuple[str, str, list[int], int]] | None = None
    bucket_bytes: int = 0
    bucket_deadline_s: float = 0.0
    abandon: bool = False

    @classmethod
    def of(cls, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout) -> UpdateInfo:
        """What an order and its layout say of the buckets."""
        return cls(
            communicator_id=order.communicator.communicator_id,
            tensors=[(t.name, t.dtype, list(t.shape), t.sender) for t in tensors_from_pb(layout)],
            bucket_bytes=layout.bucket_bytes,
            bucket_deadline_s=order.bucket_deadline_s,
        )


class BucketTransport(Protocol):
    """One member of a communicator, on the receiving side."""

    def receive(self, bucket: Bucket, device: torch.device, deadline_s: float) -> torch.Tensor:
        """The next bucket, in a uint8 tensor of its own; WeightSyncError after the deadline."""
        ...

    def close(self) -> None:
        """Leaves the communicator, also when its other members are gone."""
        ...


class GlooTransport:
    """Buckets broadcast from their senders over TCP into main memory."""

    def __init__(self, info: JoinInfo, worker_rank: int) -> None:
        """Joins; WeightSyncError when not all members came within the deadline."""
        timeout = timedelta(seconds=info.join_deadline_s)
        try:
            self._store = c10d.TCPStore(
                info.store_host,
                info.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
            self._group = _gloo_group(
                c10d.PrefixStore(info.communicator_id, self._store),
                info.first_rank + worker_rank,
                info.world_size,
                _local_address(info.store_host, info.store_port),
                timeout,
            )
        except RuntimeError as error:
            raise WeightSyncError(
                f"could not join communicator {info.communicator_id} "
                f"within {info.join_deadline_s:g} s: {error}"
            ) from error

    def receive(self, bucket: Bucket, device: torch.device, deadline_s: float) -> torch.Tensor:
        """See `BucketTransport`; the tensor lies in main memory."""
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = bucket.root, 0
        options.timeout = timedelta(seconds=deadline_s)
        try:
            self._group.broadcast([buffer], options).wait(timedelta(seconds=deadline_s))
        except RuntimeError as error:
            raise WeightSyncError(
                f"a bucket of {bucket.num_bytes} bytes did not arrive "
                f"within {deadline_s:g} s: {error}"
            ) from error
        return buffer

    def close(self) -> None:
        """See `BucketTransport`."""
        del self._group, self._store


def _gloo_group(
    store: c10d.Store, rank: int, world_size: int, local_address: str, timeout: timedelta
) -> Any:  # noqa: ANN401 - torch gives the class no public stub
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=local_address)]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


def _local_address(host: str, port: int) -> str:
    """The address of the interface through which `host` is reached."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


# NCCL and CUDA IPC are further entries.
_TRANSPORTS = {"gloo": GlooTransport}


class SlipstreamWeightTransfer(WeightTransferEngine[JoinInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives the buckets of a publish and loads them through vLLM's layerwise reload."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _transport: BucketTransport | None = None
    _communicator_id = ""
    # Off only in the test that shows what goes wrong without it.
    refresh_kept_linears = True

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Joins a new communicator and leaves the one before."""
        self.shutdown()
        # It warns of buffers that no checkpoint holds, at every update; we check the parameters.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        if init_info.transport not in _TRANSPORTS:
            raise WeightSyncError(f"transport {init_info.transport!r} is not known here")
        self._transport = _TRANSPORTS[init_info.transport](init_info, self.parallel_config.rank)
        self._communicator_id = init_info.communicator_id

    def start_weight_update(self) -> None:
        """Prepares every layer for its new weights."""
        self._digests: list[bytes] = []
        self._missing = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads everything; after an error only a whole new update makes it usable."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # The reload keeps what arrived: a second update would mix both.
            finalize_layerwise_reload(self.model, self.model_config)
            self.shutdown()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives all buckets, each within its deadline, and hands their tensors to the model."""
        if update_info.abandon:
            raise WeightSyncError("the update was abandoned")
        if self._transport is None or self._communicator_id != update_info.communicator_id:
            raise WeightSyncError(f"not a member of communicator {update_info.communicator_id!r}")
        tensors = [TensorSpec(n, d, tuple(s), r) for n, d, s, r in update_info.tensors or ()]
        for bucket in plan_buckets(tensors, update_info.bucket_bytes):
            # Never a buffer twice: the layerwise reload keeps references into it until a layer is
            # complete.
            buffer = self._transport.receive(bucket, self.device, update_info.bucket_deadline_s)
            data = buffer.cpu().numpy().data
            self._digests.append(bucket_digest(bucket_tensor_digests(bucket, data)))
            loaded = self.model.load_weights(_cut(buffer, bucket))
            # Not every model says what it loaded.
            self._missing -= self._missing if loaded is None else loaded
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise WeightSyncError(f"{len(self._missing)} parameters were left out: {names}")

    def finish_weight_update(self) -> None:
        """Finalises the layers."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.refresh_kept_linears:
            _repack_kept_linears(self.model)
        if self.device.type == "cpu":
            _repack_experts(self.model)

    def take_digests(self) -> list[bytes]:
        """The digests of the last update's buckets."""
        return self._digests

    def shutdown(self) -> None:
        """Leaves the communicator."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._communicator_id = None, ""


def _cut(buffer: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    for span in bucket.spans:
        tensor = span.tensor
        data = buffer[span.offset_bytes : span.offset_bytes + tensor.num_bytes]
        yield tensor.name, data.view(getattr(torch, tensor.dtype)).view(tensor.shape)


def _repack_kept_linears(model: torch.nn.Module) -> None:
    """Packs again the weights of modules that keep `.weight` beside a prepacked matrix.

    vLLM for CPU packs a tied head at the start; no weight arrives under its name later, so that it
    would compute with the old weights for ever (0.32.0).
    """
    for module in model.modules():
        if "cpu_linear" not in vars(module) or "quant_method" not in vars(module):
            continue
        weight = module.weight
        if isinstance(weight, torch.Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]


def _repack_experts(model: torch.nn.Module) -> None:
    """Packs the experts' matrices again.

    vLLM for CPU packs them when it makes their kernel, and at no later load: it would compute with
    plain matrices as if they were packed (0.32.0).
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            kernel = module.quant_method.moe_kernel
            kernel.fused_experts.process_weights_after_loading(module)


class WorkerExtension:
    """Calls that every vLLM worker answers beside its own; `self` is the worker."""

    weight_transfer_engine: SlipstreamWeightTransfer
    update_weights: Callable[[dict[str, Any]], None]

    def slipstream_digests(self) -> list[str]:
        """Hexadecimal digests of the last update's buckets."""
        return [digest.hex() for digest in self.weight_transfer_engine.take_digests()]

    def slipstream_refresh_kept_linears(self, enabled: bool) -> None:
        """Turns the repacking of tied heads on or off, to show what it is for."""
        self.weight_transfer_engine.refresh_kept_linears = enabled

    def slipstream_abandon_update(self) -> None:
        """Clears vLLM's flag of an open update, whichever step failed."""
        # Only a failing `update_weights` clears it; without an open update that fails as well.
        with contextlib.suppress(WeightSyncError, RuntimeError):
            self.update_weights({"abandon": True})


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SlipstreamWeightTransfer)
