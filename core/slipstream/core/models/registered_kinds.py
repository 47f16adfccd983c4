"""Kinds of models that transformers does not know, though it has their classes.

Importing this module registers them with transformers, so only programs that load models do.
"""

from transformers import AutoConfig, DeepseekV3Config, Qwen2Config


class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]
    """The config.json of Kimi K2, a DeepSeek V3."""

    model_type = "kimi_k2"


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """The config.json of MiMo 7B, a Qwen2 with layers that predict further tokens."""

    model_type = "mimo"


for _kind in (KimiK2Config, MiMoConfig):
    AutoConfig.register(_kind.model_type, _kind)
