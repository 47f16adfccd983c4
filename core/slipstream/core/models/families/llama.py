"""Llama."""

from slipstream.core.models.family import DENSE, Family

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", values=DENSE, has_engine_bits=True),
)
