from __future__ import annotations

from types import SimpleNamespace

import pytest
from slipstream.learner.trainer.lora import _check
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.lora_section import LoraSection


def test_adapters_of_experts_are_refused() -> None:
    mixture = SimpleNamespace(config=SimpleNamespace(num_moe_experts=8))
    with pytest.raises(ConfigError, match="leave out linear_fc1 and linear_fc2 for a mixture"):
        _check(mixture, LoraSection())
    _check(mixture, LoraSection(target_modules=("linear_qkv",)))
    _check(SimpleNamespace(config=SimpleNamespace(num_moe_experts=None)), LoraSection())
