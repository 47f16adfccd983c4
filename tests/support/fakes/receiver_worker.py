"""The receiver of weights in a vLLM worker without an engine: a real model that nothing runs."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.protocol.weights.buckets import layout_from_pb
from slipstream.v1 import weights_pb2

from support.fakes.gloo_sender import GlooSender, layout_of, pack
from support.fakes.plain_matrices import keep_matrices_plain
from support.ranks.loader_ranks import SHAPES, checkpoint, two_models

Weights = Mapping[str, torch.Tensor]
SMALL = 20_000
LARGE = 30_000


class Scene:
    def __init__(
        self, folder: Path, shape: str, *, stage: bool, moving: bool = False
    ) -> None:
        keep_matrices_plain()
        config, self._model, self._fresh = two_models(
            folder / shape, SHAPES[shape], 0, 1
        )
        config.parallel_config.enable_eplb = moving
        self._worker = _worker(config, self._model)
        self._sender = GlooSender("first")
        self._stage = stage
        self._count = 0
        self.first, self.second = (
            checkpoint(folder / shape, 1),
            checkpoint(folder / shape, 2),
        )
        self._model.load_weights(iter(self.first.items()))
        self.seen: list[Any] = []

    def publish(
        self, weights: Weights, bucket_bytes: int, most: int | None = None
    ) -> None:
        """An update; notes (by plan, the weights are what the loader makes of them)."""
        self._count += 1
        layout = layout_of(weights, bucket_bytes)
        if most is not None:
            # Somebody waits for those that do not come.
            self._sender.deadline_s = 1.0
        order = self._sender.order(f"p{self._count}", self._count)
        sending = threading.Thread(
            target=self._sender.send,
            args=(layout, weights),
            kwargs={"max_buckets": most},
        )
        sending.start()
        try:
            result = self._updated(order, layout)
        except WeightSyncError as error:
            self.seen.append(str(error))
            return
        finally:
            sending.join()
        self.seen.append((result["by_plan"], self._is_same(weights)))

    def publish_file(self, weights: Weights, path: Path) -> None:
        """The same from a file that a server has fetched; notes whether digests agree too."""
        self._count += 1
        layout = layout_of(weights, SMALL)
        path.write_bytes(
            b"".join(pack(b, weights).numpy() for b in layout_from_pb(layout))
        )
        order = self._sender.order(f"p{self._count}", self._count)
        order.communicator.Clear()
        order.communicator.transport, order.communicator.path = "storage", str(path)
        # Every publish through storage has its own name, and keeps no communicator.
        order.communicator.communicator_id = order.publish_id
        order.new_communicator = True
        result = self._updated(order, layout)
        digests = [bytes.fromhex(digest) for digest in result["digests"]]
        is_sent = digests == self._sender.digests(layout, weights)
        self.seen.append((result["by_plan"], self._is_same(weights), is_sent))

    def _updated(
        self, order: weights_pb2.PublishOrder, layout: weights_pb2.WeightLayout
    ) -> dict[str, Any]:
        ready = value_of(
            self._worker.slipstream_call(
                "prepare",
                order.SerializeToString(),
                layout.SerializeToString(),
                1,
                self._stage,
            )
        )
        while not ready:
            time.sleep(0.002)
            ready = value_of(self._worker.slipstream_call("is_ready"))
        if self._worker.weight_transfer_engine.can_copy:
            value_of(self._worker.slipstream_call("begin"))
        return value_of(self._worker.slipstream_call("receive"))

    def _is_same(self, weights: Weights) -> bool:
        """Whether the model has what the loader makes of these weights."""
        self._fresh.load_weights(iter(weights.items()))
        loaded = dict(self._model.named_parameters())
        return all(torch.equal(loaded[n], p) for n, p in self._fresh.named_parameters())

    def meet_again(self, deadline_s: float = 30.0) -> None:
        """A new communicator at the next update, with this deadline of a bucket."""
        self._sender = GlooSender("second", deadline_s=deadline_s)

    def slow_down_recording(self, seconds: float) -> None:
        """The next call of the model's loader, which is recorded, takes longer."""
        load_weights = self._model.load_weights
        waits = [seconds]

        def slow(weights: Any) -> Any:
            # A recording calls it for each bucket.
            while waits:
                time.sleep(waits.pop())
            return load_weights(weights)

        self._model.load_weights = slow

    def add_scales(self) -> list[Any]:
        """Linear layers compute a scale when their weights have come, as quantised ones do."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.utils import replace_parameter

        class Scaled(UnquantizedLinearMethod):  # type: ignore[misc]
            def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
                replace_parameter(layer, "weight_scale", scale_of(layer))

        layers = [
            layer
            for layer in self._model.modules()
            if type(vars(layer).get("quant_method")) is UnquantizedLinearMethod
        ]
        for layer in layers:
            layer.quant_method = Scaled()
            layer.quant_method.process_weights_after_loading(layer)
        return layers


def updates(rank: int, folder: Path, shape: str, stage: bool) -> list[Any]:
    """Other weights, other buckets, a transfer that stops, and one more after it."""
    scene = Scene(folder, shape, stage=stage)
    for weights in (scene.first, scene.second, scene.first):
        scene.publish(weights, SMALL)
    for weights in (scene.second, scene.first):
        scene.publish(weights, LARGE)
    scene.publish(scene.second, LARGE, most=1)
    scene.meet_again()
    scene.publish(scene.second, LARGE)
    return scene.seen


def updates_from_files(rank: int, folder: Path, shape: str, stage: bool) -> list[Any]:
    """Three updates from the file into which a server fetches."""
    scene = Scene(folder, shape, stage=stage)
    path = folder / f"{shape}-{stage}-fetched"
    for weights in (scene.first, scene.second, scene.first):
        scene.publish_file(weights, path)
    return scene.seen


def updates_of_layers_with_scales(rank: int, folder: Path, shape: str) -> list[Any]:
    """Two of them, and whether all scales are those of the new weights then."""
    scene = Scene(folder, shape, stage=False)
    layers = scene.add_scales()
    for weights in (scene.first, scene.second):
        scene.publish(weights, SMALL)
        scene.seen.append(
            all(torch.equal(layer.weight_scale, scale_of(layer)) for layer in layers)
        )
    return [len(layers), *scene.seen]


def scale_of(layer: torch.nn.Module) -> torch.Tensor:
    """What `Scene.add_scales` adds to it."""
    return layer.weight.detach().abs().amax().reshape(1)


def updates_while_experts_move(rank: int, folder: Path, shape: str) -> list[Any]:
    """Two of them, in an engine that balances the load of its experts."""
    scene = Scene(folder, shape, stage=False, moving=True)
    for weights in (scene.first, scene.second):
        scene.publish(weights, SMALL)
    return scene.seen


def first_update_with_slow_recording(rank: int, folder: Path, shape: str) -> list[Any]:
    """The loader takes longer to be recorded than a bucket may take."""
    scene = Scene(folder, shape, stage=False)
    scene.slow_down_recording(seconds=2.0)
    scene.meet_again(deadline_s=1.0)
    scene.publish(scene.first, LARGE)
    return scene.seen


def value_of(answer: dict[str, Any]) -> Any:
    """What a worker answered; WeightSyncError for an error."""
    if "error" in answer:
        raise WeightSyncError(answer["error"])
    return answer["value"]


def _worker(config: Any, model: Any) -> Any:
    from slipstream.rollout_server.vllm.weight_receiver import (
        BACKEND,
        SlipstreamWeightTransfer,
        WorkerExtension,
    )
    from vllm.config import WeightTransferConfig

    transfer = WeightTransferConfig(backend=BACKEND)
    config.weight_transfer_config = transfer

    class Worker(WorkerExtension):
        """What vLLM's worker has of a receiver of weights."""

        weight_transfer_engine = SlipstreamWeightTransfer(
            transfer, config, torch.device("cpu"), model
        )
        model_runner = SimpleNamespace(reset_lora_state=lambda: None)

    return Worker()
