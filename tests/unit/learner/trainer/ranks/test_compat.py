"""Cures of Megatron's faults that ranks on a CPU do not need."""

import sys
from types import SimpleNamespace

import pytest
from slipstream.learner.trainer.ranks import compat

clipping = pytest.importorskip("megatron.core.optimizer.clip_grads")


def test_gradient_norms_take_the_kernels_that_transformer_engine_has(monkeypatch) -> None:
    kernels = ("multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale")
    engine = SimpleNamespace(**{name: object() for name in kernels})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", engine)
    bound = ("multi_tensor_applier", "l2_norm_impl", "multi_tensor_scale_impl")
    for name in bound:
        monkeypatch.setattr(clipping, name, None)
    compat._cure_clipping()
    for name, kernel in zip(bound, kernels, strict=True):
        assert getattr(clipping, name) is getattr(engine, kernel)
