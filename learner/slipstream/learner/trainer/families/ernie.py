"""The recipe of ERNIE 4.5, dense."""

from __future__ import annotations

from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.core.models.gpt.gpt_model import GPTModel
from slipstream.learner.trainer.families.families import DenseBridge
from slipstream.learner.trainer.untyped import Megatron
from transformers import Ernie4_5ForCausalLM


@MegatronModelBridge.register_bridge(
    source=Ernie4_5ForCausalLM, target=GPTModel, model_type="ernie4_5"
)
class ErnieBridge(DenseBridge):
    """ERNIE 4.5: a Llama whose positions turn neighbouring dimensions of a head.

    Source: transformers 5.17, `apply_rotary_pos_emb` of its class.
    """

    def _adjust(self, provider: Megatron, settings: Megatron) -> None:
        provider.rotary_interleaved = True
