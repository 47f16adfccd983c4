"""ERNIE 4.5, dense."""

from slipstream.core.models.family import DENSE, Family

FAMILIES = (
    Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", values=DENSE, is_tied=True),
)
