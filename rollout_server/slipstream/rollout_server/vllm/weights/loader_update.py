"""One update of a model's weights through vLLM's own loader.

Consumes: buckets. Produces: a loaded model, and what a copy plan would have to do. Waits for: each
bucket. Unblocked by: the bucket, or its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from slipstream.core.errors import WeightSyncError
from slipstream.rollout_server.vllm.weights import vllm_layers
from slipstream.rollout_server.vllm.weights.fp8_plan import Fp8Check, Fp8Plan
from slipstream.rollout_server.weights.bucket_receiver import BucketReceiver, Incoming
from slipstream.rollout_server.weights.copy_plan import cut
from slipstream.rollout_server.weights.weight_update import LoadResult
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import reload


class LoaderUpdate:
    """The loader's way: the layers are taken apart, `receive` fills them, `finish` completes them.

    After an error the reload must be finalised, and the model needs a whole new update.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Prepares every layer for its new weights."""
        self._started_s = time.perf_counter()
        self._model, self._model_config = model, model_config
        self.parameters = dict(model.named_parameters())
        reload.initialize_layerwise_reload(model)
        # Parameters that layers compute from others after loading, such as scales, are never sent.
        awaited = self.parameters.keys() & dict(model.named_parameters()).keys()
        self._missing = set(map(vllm_layers.loaded_name, awaited))
        # Notes what the loader does with each bucket; None: there is no plan to compare it with.
        self.check: Fp8Check | None = None
        self._digests: list[bytes] = []
        self._receive_s = self._wire_s = 0.0

    def receive(
        self,
        receiver: BucketReceiver,
        incoming: Incoming,
        plan: Fp8Plan | None,
        *,
        num_weights: int,
        keep_adapters: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Receives all buckets, each within its deadline, and hands their tensors to the model.

        The first `num_weights` buckets hold weights; `keep_adapters` takes the others.
        """
        self.check = None if plan is None else Fp8Check(plan, self.parameters)
        waiting_s = time.perf_counter()
        for place, buffer in enumerate(receiver.receive(incoming)):
            self._receive_s += time.perf_counter() - waiting_s
            if place >= num_weights:
                keep_adapters(place, buffer)
            else:
                # The layerwise reload keeps references into the buffer until a layer is complete.
                loaded = vllm_layers.load_tensors(self._model, cut(buffer, incoming.buckets[place]))
                # Some models do not say what they loaded.
                named = None if loaded is None else set(map(vllm_layers.loaded_name, loaded))
                self._missing -= self._missing if named is None else named
                if self.check is not None:
                    self.check.add(place, buffer)
            waiting_s = time.perf_counter()
        self._digests = receiver.digests()
        self._wire_s = receiver.take_wire().seconds
        if self._missing:
            names = ", ".join(sorted(self._missing)[:3])
            raise WeightSyncError(f"{len(self._missing)} parameters were left out: {names}")

    def finish(self, *, on_cpu: bool) -> None:
        """Finalises the layers."""
        reload.finalize_layerwise_reload(self._model, self._model_config)
        if on_cpu:
            vllm_layers.repack_experts(self._model)

    def result(self, shares: list[tuple[str, str]], *, has_plan: bool) -> LoadResult:
        """Returns the digests and the times up to now."""
        return LoadResult(
            digests=[digest.hex() for digest in self._digests],
            shares=shares,
            by_plan=False,
            has_plan=has_plan,
            receive_s=self._receive_s,
            load_s=time.perf_counter() - self._started_s - self._receive_s,
            wire_s=self._wire_s,
        )
