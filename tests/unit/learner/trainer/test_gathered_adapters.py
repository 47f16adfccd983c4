"""Which adapters gather their inputs themselves."""

from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.learner.trainer.model.policy import gathering_itself


@pytest.mark.parametrize(("fused", "silent"), [(True, False), (False, True)])
def test_an_adapter_behind_a_fused_norm_gathers_its_inputs_itself(
    fused: bool, silent: bool
):
    wrapped = SimpleNamespace(return_layernorm_output_gathered=fused)
    module: Any = SimpleNamespace(
        to_wrap=wrapped, adapter=SimpleNamespace(disable_sequence_parallel_comm=True)
    )
    assert gathering_itself(module) is module
    assert wrapped.return_layernorm_output_gathered is False
    assert module.adapter.disable_sequence_parallel_comm is silent


def test_modules_without_an_adapter_stay_as_they_are():
    module = SimpleNamespace(weight=1)
    assert gathering_itself(module) is module
    assert vars(module) == {"weight": 1}
