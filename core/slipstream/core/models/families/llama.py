"""Records of Llama, and of ERNIE 4.5 without experts, which computes the same as a Llama."""

from slipstream.core.models.family import DENSE, Family

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", values=DENSE, has_engine_bits=True),
    Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", values=DENSE, is_tied=True),
)
