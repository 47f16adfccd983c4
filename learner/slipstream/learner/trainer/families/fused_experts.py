"""Experts whose matrices lie together in one tensor of the files.

Importing this module imports Bridge's classes, so do it only after Bridge itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping
from megatron.bridge.utils.common_utils import extract_expert_number_from_param
from slipstream.learner.trainer.families.mappings import DECODER, EXPERTS, LAYER, renamed
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor


class FusedExperts:
    """Reads the tensor of all experts of a layer once, and puts those of all ranks together.

    It stands before the class of a bridge.
    """

    hf_config: Megatron
    # Whether the files have matrices as tokens are multiplied by them, not as Megatron has them.
    is_turned = True

    def __init__(self) -> None:
        super().__init__()
        # Tensors of all experts of a layer: the one that is being loaded, or those that are being
        # put together for export.
        self.hf_weights_cache: dict[str, Megatron] = {}

    def maybe_modify_loaded_hf_weight(
        self, hf_param: str | dict[str, str], hf_state_dict: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Returns what a parameter is made of; matrices of experts as Megatron has them."""
        if not isinstance(hf_param, str):
            return {name: hf_state_dict[theirs] for name, theirs in hf_param.items()}
        if ".mlp.experts." not in hf_param:
            return hf_state_dict[hf_param]
        if hf_param not in self.hf_weights_cache:
            whole = hf_state_dict[hf_param]
            is_matrix = whole.dim() == 3
            turned = whole.mT if is_matrix and self.is_turned else whole
            self.hf_weights_cache = {hf_param: turned}
        found: Tensor = self.hf_weights_cache[hf_param]
        return found

    def maybe_modify_converted_hf_weight(
        self,
        task: Megatron,
        converted_weights_dict: dict[str, Tensor],
        _hf_state_dict: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Returns tensors of the files; {} until the last expert of a layer comes."""
        if ".mlp.experts." not in task.param_name:
            return converted_weights_dict
        ((name, tensor),) = converted_weights_dict.items()
        settings = self.hf_config.get_text_config()
        num_experts = getattr(settings, "num_local_experts", None) or settings.num_experts
        num_ranks = task.mapping.ep_size
        per_rank = num_experts // num_ranks
        first = extract_expert_number_from_param(task.param_name) % per_rank
        found = self.hf_weights_cache.setdefault(name, {})
        for rank, own in enumerate(tensor if num_ranks > 1 else [tensor]):
            found[first + rank * per_rank] = own
        if len(found) < num_experts:
            return {}
        del self.hf_weights_cache[name]
        return {name: torch.stack([found[expert] for expert in range(num_experts)])}


class _OneExpert(AutoMapping):  # type: ignore[misc]
    """A matrix of one expert in the tensor of all, which has its columns as rows."""

    is_turned = True

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Megatron) -> Tensor:
        """Returns this rank's part of the expert's matrix."""
        expert = extract_expert_number_from_param(self.megatron_param)
        found: Tensor = super().hf_to_megatron(hf_weights[expert].contiguous(), megatron_module)
        return found

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: Megatron
    ) -> dict[str, Tensor]:
        """Returns the expert's matrix, or one of each rank of experts."""
        found = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: self._as_in_files(tensor) for name, tensor in found.items()}

    def _validate_patterns(self, *_args: object, **_named: object) -> None:
        """Lets the files' name have no place for the number of an expert."""

    def _as_in_files(self, tensor: Tensor) -> Tensor:
        return (tensor.mT if self.is_turned else tensor).contiguous()


class _OneGatedExpert(_OneExpert):
    """Gate and up of one expert, one behind the other."""

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Megatron) -> Tensor:
        """Returns this rank's parts of both matrices."""
        expert = extract_expert_number_from_param(self.megatron_param)
        gate, up = hf_weights[expert].chunk(2)
        parts = {"gate": gate.contiguous(), "up": up.contiguous()}
        found: Tensor = self._both().hf_to_megatron(parts, megatron_module)
        return found

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: Megatron
    ) -> dict[str, Tensor]:
        """Returns both matrices, or those of each rank of experts."""
        found = self._both().megatron_to_hf(megatron_weights, megatron_module)
        if not found:
            return {}
        gate, up = (found[f"{self.hf_param}.{name}"] for name in ("gate", "up"))
        both = torch.cat([gate, up], dim=-2)
        return {str(self.hf_param): self._as_in_files(both)}

    def _both(self) -> Megatron:
        names = {name: f"{self.hf_param}.{name}" for name in ("gate", "up")}
        return GatedMLPMapping(megatron_param=self.megatron_param, **names)


class _OneExpertAsIs(_OneExpert):
    """A matrix of one expert in a tensor of all that has matrices as Megatron has them."""

    is_turned = False


class _OneGatedExpertAsIs(_OneGatedExpert):
    """Gate and up of one expert in such a tensor."""

    is_turned = False


def fused_experts(*, is_turned: bool = True) -> list[Megatron]:
    """Returns the mappings of the router and of all experts of a layer together.

    `is_turned`: see `FusedExperts`.
    """
    folder = f"{LAYER}mlp.experts."
    gated, plain = _OneGatedExpertAsIs, _OneExpertAsIs
    if is_turned:
        gated, plain = _OneGatedExpert, _OneExpert
    return [
        *renamed({f"{DECODER}mlp.router.weight": f"{LAYER}mlp.gate.weight"}),
        gated(megatron_param=f"{EXPERTS}linear_fc1.weight*", hf_param=f"{folder}gate_up_proj"),
        plain(megatron_param=f"{EXPERTS}linear_fc2.weight*", hf_param=f"{folder}down_proj"),
    ]
