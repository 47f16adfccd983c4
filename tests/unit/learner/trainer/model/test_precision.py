from types import SimpleNamespace

import pytest
import torch
from slipstream.core.errors import ConfigError
from slipstream.core.settings.sections import LearnerSection, OffloadSection
from slipstream.learner.trainer.model.model import token_alignment
from slipstream.learner.trainer.model.recipe import check_fp8
from slipstream.learner.trainer.ranks import compat

FP8 = {"fp8": "e4m3", "fp8_param": True}
# Numbers of tokens that each recipe of FP8 takes are multiples of these.
MULTIPLES = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_8_bit_parameters_cannot_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    pretend_gpu(monkeypatch, (9, 0))
    check_fp8(FP8, LearnerSection())
    learner = LearnerSection(offload=OffloadSection(parameters=True))
    with pytest.raises(
        ConfigError, match=r"learner\.offload\.parameters cannot move 8-bit"
    ):
        check_fp8(FP8, learner)


def test_a_learner_in_fp8_needs_transformer_engine_and_a_gpu_that_has_it(
    monkeypatch,
) -> None:
    learner = LearnerSection(fp8="blockwise")
    with pytest.raises(
        ConfigError, match=r"^learner\.fp8 'blockwise' needs TransformerEngine, w"
    ):
        check_fp8(FP8, learner)
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    pretend_gpu(monkeypatch, (8, 0))
    with pytest.raises(
        ConfigError, match=r"needs a GPU of compute capability 8\.9 or above"
    ):
        check_fp8(FP8, learner)
    pretend_gpu(monkeypatch, (8, 9))
    check_fp8(FP8, learner)


def test_8_bit_products_ask_for_multiples_of_tokens() -> None:
    assert token_alignment(SimpleNamespace(fp8=None)) == 1
    for recipe, multiple in MULTIPLES.items():
        settings = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe)
        assert token_alignment(settings) == multiple


@pytest.mark.parametrize(
    ("settings", "aligned"),
    [
        ({"num_moe_experts": None}, 4),
        ({"num_moe_experts": 8}, 1),
        ({"num_moe_experts": None, "agreement": "bits"}, 1),
    ],
)
def test_faster_norms_ask_for_blocks_of_tokens_where_none_is_routed(
    settings, aligned, monkeypatch
):
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    assert token_alignment(SimpleNamespace(fp8=None, **settings)) == aligned
