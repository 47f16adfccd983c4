"""Llama."""

from __future__ import annotations

from slipstream.core.models.family import DENSE, Family

FAMILIES = (Family(architecture="LlamaForCausalLM", model_type="llama", values=DENSE),)
