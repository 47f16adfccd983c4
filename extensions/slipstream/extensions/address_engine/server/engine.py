"""An `Engine` that is a vLLM server at an address; this process is the one receiver of weights.

Consumes: buckets of weights, prompts. Produces: replies, digests. Waits for: buckets, the server.
Unblocked by: a bucket's deadline, the limits of `connection` and `pauses`.
"""

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from slipstream.core.configuration.config_file import vocabulary_size
from slipstream.core.errors import WeightSyncError
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray
from slipstream.extensions.address_engine.address import Served, check_server, token_headers
from slipstream.extensions.address_engine.server.connection import Connection
from slipstream.extensions.address_engine.server.pauses import AddressPauses
from slipstream.extensions.address_engine.server.requests import PROBE_PREFIX, AddressRequests
from slipstream.extensions.address_engine.server.stamps import Stamps
from slipstream.protocol.weights.buckets import Bucket, weight_buckets
from slipstream.rollout_server.engine_interface import LoadedWeights, Sampling
from slipstream.rollout_server.weights.bucket_receiver import GlooReceiver, Incoming
from slipstream.rollout_server.weights.copy_plan import cut
from slipstream.v1 import fleet_pb2, weights_pb2

# Folder of the run in which the server finds the weights to load.
WEIGHTS = "address_engine"
_LOAD_LIMIT_S = 600.0
_SCORING = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_reply_tokens=1,
    max_turns=1,
    max_episode_tokens=1,
    prompt_logprobs=True,
)


async def start(config: Config) -> "AddressEngine":
    """Returns the engine, paused; raises ConfigError if the server cannot be one."""
    served = await asyncio.to_thread(check_server, config)
    engine = AddressEngine(config, served)
    try:
        await engine.pauses.claim()
    except BaseException:
        await engine.aclose()
        raise
    return engine


class AddressEngine:
    """The engine at one address.

    A whole update lies in main memory, and then in a file, before the server is paused: it waits
    only while it loads.
    """

    num_workers = 1
    num_experts = 0

    def __init__(self, config: Config, served: Served) -> None:
        self.max_model_len = served.max_model_len
        self.disabled_features: Mapping[str, str] = {}
        stamps = Stamps(config.run.name)
        headers = token_headers(config.rollout_server.engine_token_file)
        self._connection = Connection(served.url, headers)
        self.pauses = AddressPauses(self._connection, stamps)
        self.requests = AddressRequests(
            self._connection,
            self.pauses,
            stamps,
            vocabulary=vocabulary_size(config.model.path),
        )
        self._folder = (config.run_dir / WEIGHTS).resolve()
        # A server that was killed has left a version there.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._receiver: GlooReceiver | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._order: weights_pb2.PublishOrder | None = None
        self._num_probes = 0

    async def prepare_weights(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout, first_rank: int
    ) -> None:
        self._order = None
        if layout.adapters:
            raise WeightSyncError("an engine at an address takes no adapters")
        if order.communicator.transport != "gloo":
            transport = order.communicator.transport
            raise WeightSyncError(f"an engine at an address takes weights by gloo, got {transport}")
        if layout.tensors:
            self._buckets = tuple(weight_buckets(layout))
        if not self._buckets:
            raise WeightSyncError(f"publish {order.publish_id!r} came without a layout")
        if order.new_communicator or self._receiver is None:
            self._leave()
            self._receiver = await asyncio.to_thread(
                GlooReceiver,
                order.communicator,
                first_rank,
                order.join_deadline_s,
                torch.device("cpu"),
            )
        self._order = order

    async def receive_weights(self, publish_id: str) -> LoadedWeights:
        order = self._order
        receiver = self._receiver
        self._order = None
        if order is None or receiver is None or order.publish_id != publish_id:
            raise WeightSyncError(f"publish {publish_id!r} was not prepared")
        folder = self._folder / "new"
        begun_s = time.monotonic()
        deadline_s = order.bucket_deadline_s
        try:
            digests = await asyncio.to_thread(self._receive, receiver, folder, deadline_s)
            received_s = time.monotonic()
            async with self.pauses.change():
                await self.pauses.pause_within()
                paused_s = time.monotonic()
                await self._load(folder)
                await self.pauses.check_paused()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        stages = fleet_pb2.PublishStages(
            pause_s=paused_s - received_s,
            receive_s=received_s - begun_s,
            load_s=time.monotonic() - paused_s,
        )
        return LoadedWeights(tuple(digests), stages, paused_s)

    async def teacher_forced_logprobs(
        self, sequences: Sequence[Sequence[int]], adapters: Sequence[str] = ()
    ) -> LogprobArray:
        self._num_probes += 1

        async def score(number: int, token_ids: Sequence[int]) -> LogprobArray:
            request_id = f"{PROBE_PREFIX}{self._num_probes}/{number}"
            scored = await self.requests.generate(request_id, token_ids, _SCORING, 1)
            assert scored.prompt_logprobs is not None, "they were asked for"
            return scored.prompt_logprobs

        parts = [np.empty(0, dtype=np.float32)]
        scores = (score(*numbered) for numbered in enumerate(sequences))
        for logprobs in await asyncio.gather(*scores, return_exceptions=True):
            if isinstance(logprobs, BaseException):
                raise logprobs
            parts.append(logprobs)
        return np.concatenate(parts)

    async def watch(self) -> None:
        await self.pauses.watch()

    async def aclose(self) -> None:
        """Closes the connections; the server at the address goes on, as it is."""
        self._leave()
        shutil.rmtree(self._folder, ignore_errors=True)
        await self._connection.aclose()

    def _receive(self, receiver: GlooReceiver, folder: Path, deadline_s: float) -> list[bytes]:
        """Writes the version to `folder`; returns the digests of its buckets, which came here."""
        incoming = Incoming(self._buckets, deadline_s, own_buffers=True)
        tensors: dict[str, torch.Tensor] = {}
        for bucket, data in zip(self._buckets, receiver.receive(incoming), strict=True):
            tensors |= dict(cut(data, bucket))
        digests = receiver.digests()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # vLLM reads files of this name, whose metadata must say so.
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return digests

    async def _load(self, folder: Path) -> None:
        """Has the paused server load the version; raises WeightSyncError if it refuses."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        answer = await self._connection.call(
            "POST", "/collective_rpc", limit_s=_LOAD_LIMIT_S, body=body
        )
        if answer.status_code != 200:
            raise WeightSyncError(self._connection.refusal(answer))

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
