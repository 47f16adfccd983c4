"""The adapters of an engine: vLLM's arguments for adapters, their tensors and their activation.

The tensors are replaced between two steps of the engine; requests refer to adapters by id.
"""

from typing import get_args

import torch
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.settings.role_sections import LoraSection, matrices_named
from slipstream.protocol.weights.buckets import Bucket
from slipstream.rollout_server.engine_interface import GenerationFailed
from slipstream.rollout_server.weights.copy_plan import cut
from slipstream.v1 import weights_pb2
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.models.utils import PPMissingLayer


class AdapterRequests:
    """Maps the adapter names in `lora` to the LoRARequests by which vLLM finds them.

    If vLLM lacks an adapter, vLLM tries to load it from `lora_path`, which does not exist. The
    request then fails, instead of running without the adapter.
    """

    def __init__(self, lora: LoraSection) -> None:
        self._names = lora.adapters
        self._requests: dict[str, LoRARequest | None] = {"": None}
        self._are_apart = lora.publishes_adapters
        if self._are_apart:
            self._requests = {
                name: LoRARequest(
                    lora_name=name or "policy", lora_int_id=number, lora_path="/sent by the learner"
                )
                for number, name in enumerate(self._names or ("",), 1)
            }

    def request(self, name: str, *, by_start: bool = False) -> LoRARequest | None:
        """Returns vLLM's request for an adapter, or None for the model without an adapter.

        `by_start` asks for the model as it was at the start of the run. Raises GenerationFailed
        when the run has no such adapter.
        """
        if by_start:
            assert self._are_apart, "the start's weights are overwritten"
            return None
        if name not in self._requests:
            adapter_names = ", ".join(self._names) or "empty"
            raise GenerationFailed(
                f"there is no adapter {name!r}, lora.adapters are {adapter_names}"
            )
        return self._requests[name]

    def check(self, layout: weights_pb2.WeightLayout) -> None:
        """Raises WeightSyncError when `layout` has other adapters than this server."""
        if layout.adapters and tuple(layout.adapter_names) != self._names:
            came = ", ".join(layout.adapter_names)
            here = ", ".join(self._names)
            raise WeightSyncError(
                f"lora.adapters must be alike for learner and rollout servers, got {came or 'none'}"
                f" and {here or 'none'}"
            )


def lora_arguments(lora: LoraSection, *, on_cpu: bool) -> dict[str, object]:
    """Returns vLLM's arguments for the adapters of `lora`; {} if they are published merged.

    For a request without an adapter vLLM's CPU kernels compute with the last adapter slot (index
    -1), so on CPUs there is one more slot, which stays empty.
    """
    if not lora.publishes_adapters:
        return {}
    return {
        "enable_lora": True,
        "max_loras": max(len(lora.adapters), 1) + on_cpu,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank),
        # Without this list the other layers would compute with an adapter of zeros.
        "lora_target_modules": [
            part for parts in matrices_named(lora.modules).values() for part in parts
        ],
    }


def check_adapted(settings: VllmConfig) -> None:
    """Raises ConfigError if vLLM's model supports no adapters; vLLM fails only after loading."""
    model = settings.model_config
    model_class, name = model.registry.resolve_model_cls(model.architectures, model)
    if not supports_lora(model_class):
        raise ConfigError(f"lora.publish must be merged, vLLM's {name} takes no adapters")


class Arriving:
    """The adapters of one layout while they arrive: call `keep` for each bucket, then `put_on`."""

    def __init__(
        self, buckets: tuple[Bucket, ...] = (), scale: float = 0.0, *, number: int = 1
    ) -> None:
        """Expects `number` adapters of LoRA scale `scale`, each in an equal part of `buckets`.

        Without `buckets` it expects no adapters.
        """
        self.buckets = buckets
        self._scale = scale
        self._of_each = len(buckets) // number
        self._tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(number)]

    def keep(self, place: int, buffer: torch.Tensor) -> None:
        """Copies the tensors of bucket `place`; the caller may then overwrite `buffer`."""
        tensors = cut(buffer, self.buckets[place])
        adapter_tensors = self._tensors[place // self._of_each]
        adapter_tensors |= {name: tensor.clone() for name, tensor in tensors}

    def put_on(self, model: torch.nn.Module) -> None:
        """Replaces the engine's adapters by the arrived adapters; call it between two steps.

        Raises WeightSyncError when the engine has no room for adapters, or when the tensors do not
        belong to exactly the layers that it computes with an adapter, but for those of other
        stages. An adapter may then be missing in the engine.
        """
        arrived = self._tensors
        self._tensors = [{} for _ in self._tensors]
        manager: LoRAModelManager | None = vars(model).get("lora_manager")
        if manager is None:
            raise WeightSyncError(
                "the engine was started without room for adapters: set lora.publish"
            )
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        # vLLM would compute the missing layers without an adapter.
        expected = {
            part for name in manager.modules for part in manager.packed_modules.get(name, [name])
        }
        in_other_stages = tuple(
            f"{name}." for name, layer in model.named_modules() if isinstance(layer, PPMissingLayer)
        )
        for adapter_id, tensors in enumerate(arrived, 1):
            manager.remove_adapter(adapter_id)
            rank = next(iter(tensors.values())).shape[0]
            if rank > manager.lora_config.max_lora_rank:
                raise WeightSyncError(
                    f"adapters of rank {rank} arrived, the engine has room for "
                    f"{manager.lora_config.max_lora_rank}"
                )
            adapter = LoRAModel.from_lora_tensors(
                adapter_id,
                tensors,
                PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
                device=str(manager.device),
                dtype=manager.lora_config.lora_dtype,
                weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            )
            adapter.loras = {
                name: layer
                for name, layer in adapter.loras.items()
                if not name.startswith(in_other_stages)
            }
            complete_layers = {
                name
                for name, layer in adapter.loras.items()
                if layer.lora_a is not None and layer.lora_b is not None
            }
            if different := sorted(expected ^ complete_layers):
                raise WeightSyncError(
                    f"the adapters that arrived and {len(different)} layers do not fit, "
                    f"{different[0]} for one: set lora alike for learner and rollout servers"
                )
            for layer in adapter.loras.values():
                layer.scaling = self._scale
            manager.add_adapter(adapter)
            manager.activate_adapter(adapter_id)
