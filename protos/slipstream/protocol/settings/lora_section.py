"""Settings of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator
from slipstream.protocol.settings.section import Section

# What Megatron computes as one matrix, and what Hugging Face calls its parts.
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
Target = Literal[
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]


# Of dense layers and of experts alike.
_MLP = ("linear_fc1", "linear_fc2")
# The largest rank for which vLLM has kernels.
MAX_SERVED_RANK = 512


class LoraSection(Section):
    """Low-rank adapters are trained in place of the policy's parameters, which stay as they are.

    Dropout is not offered: the policy that is trained must be the one that samples.
    """

    # Rank of the adapters, a multiple of `learner.parallel.tp`; 0: none, all parameters are
    # trained.
    rank: int = Field(0, ge=0)
    # What the adapters add is multiplied by `alpha` / `rank`.
    alpha: float = Field(32.0, gt=0)
    # Matrices that get one, by Megatron's or by Hugging Face's names. Those that Megatron fuses
    # (q_proj, k_proj, v_proj; gate_proj, up_proj) come together and share their first factor.
    target_modules: tuple[Target, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    # What a publish carries: merged weights, as many bytes as without adapters; or the adapters
    # alone, which vLLM computes beside the matrices. The first publish to a server, and the first
    # one of a trainer that was started again, then carries the matrices too. On GPUs vLLM computes
    # adapters in half precision only: not with `model.dtype` "float32".
    publish: Literal["merged", "adapters"] = "merged"

    @property
    def publishes_adapters(self) -> bool:
        """Whether servers get matrices and adapters apart."""
        return self.publish == "adapters"

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets by Megatron's names."""
        named = set(self.target_modules)
        return tuple(name for name, parts in FUSED.items() if named & {name, *parts})

    @model_validator(mode="after")
    def _whole(self) -> LoraSection:
        if not self.target_modules:
            raise ValueError("lora.target_modules must name a matrix, got none")
        if self.publishes_adapters and not 1 <= self.rank <= MAX_SERVED_RANK:
            raise ValueError(
                f"lora.rank must be 1 to {MAX_SERVED_RANK} with lora.publish = adapters, "
                f"got {self.rank}"
            )
        named = set(self.target_modules)
        for name, parts in FUSED.items():
            missing = set(parts) - named
            if name not in named and missing != set(parts) and missing:
                raise ValueError(
                    f"lora.target_modules must hold all of {', '.join(parts)} or none, "
                    f"{' and '.join(sorted(missing))} is missing"
                )
        return self

    def problems(self, *, num_experts: int) -> Iterator[str]:
        """Of a model with so many experts; 0: it has none.

        Megatron-Bridge gives all experts of a rank one adapter together, so that another number of
        ranks would train another model.
        """
        if self.rank and num_experts and set(self.modules) & set(_MLP):
            yield (
                f"lora.target_modules must leave out {' and '.join(_MLP)} for a mixture of "
                f"experts, got {', '.join(self.target_modules)}"
            )
