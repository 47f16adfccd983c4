"""What Megatron's objects are made of on machines with GPUs."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.layer_wise_optimizer import (
    is_managed_by_layer_wise_optimizer,
)
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from slipstream.extensions.other_models.trainer import ValueHead
from slipstream.learner.trainer.model import recipe
from slipstream.learner.trainer.ranks import compat
from support.fakes.small_configs import small_config


@pytest.mark.parametrize(
    ("learner", "reduce", "gather"),
    [
        ({}, False, False),
        ({"ddp": {"use_distributed_optimizer": True}}, False, False),
        ({"world_size": 4, "parallel": {"tp": 2, "pp": 2}}, False, False),
        ({"world_size": 2, "ddp": {"use_distributed_optimizer": False}}, True, False),
        ({"world_size": 2, "parallel": {"cp": 2}}, True, True),
        ({"world_size": 4, "parallel": {"tp": 2}}, True, True),
        ({"world_size": 2, "offload": {"parameters": True}}, False, False),
        ({"world_size": 2, "offload": {"gradients": True}}, False, False),
        ({"world_size": 2, "offload": {"optimizer": True}}, True, True),
    ],
)
def test_replicas_overlap_what_they_exchange_unless_it_is_offloaded(
    learner, reduce, gather, monkeypatch
):
    monkeypatch.setattr(recipe.torch.cuda, "is_available", lambda: True)
    ddp_config_of = recipe.ddp_config_of(small_config(learner=learner))
    assert (ddp_config_of.overlap_grad_reduce, ddp_config_of.overlap_param_gather) == (
        reduce,
        gather,
    )


@pytest.mark.parametrize(
    ("setting", "fused"), [({}, True), (True, True), (False, False)]
)
def test_layers_that_can_add_gradients_in_their_products_do_unless_told_otherwise(
    setting, fused
):
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    layers[0].fuse_wgrad_accumulation = False
    passed = {} if setting == {} else {"gradient_accumulation_fusion": setting}
    recipe.fuse_gradients([layers], small_config(learner={"transformer": passed}))
    assert layers[0].fuse_wgrad_accumulation is fused
    assert not hasattr(layers[1], "fuse_wgrad_accumulation")


def sharing(cp: int, dtype: str) -> Config:
    learner = {"world_size": cp, "parallel": {"cp": cp}}
    return small_config(model={"dtype": dtype}, learner=learner)


@pytest.mark.parametrize("kind", [None, "p2p", "a2a", ["p2p", "a2a"]])
def test_packed_sequences_are_shared_in_half_precision(kind: object) -> None:
    recipe._check_context_parallel(sharing(2, "bfloat16"), kind, has_windows=False)
    recipe._check_context_parallel(
        sharing(1, "float32"), "all_gather", has_windows=False
    )
    with pytest.raises(
        ConfigError, match=r"model.dtype must be bfloat16 .*cp 2, got float32"
    ):
        recipe._check_context_parallel(sharing(2, "float32"), kind, has_windows=False)


@pytest.mark.parametrize("kind", ["all_gather", "a2a+p2p", ["p2p", "all_gather"]])
def test_ways_of_sharing_that_need_unpacked_sequences_are_refused(kind: object) -> None:
    with pytest.raises(ConfigError, match="cp_comm_type must be p2p or a2a"):
        recipe._check_context_parallel(sharing(2, "bfloat16"), kind, has_windows=False)


@pytest.mark.parametrize("kind", [None, "p2p", ["p2p", "a2a"]])
def test_windows_need_heads_that_are_exchanged(kind: object) -> None:
    recipe._check_context_parallel(sharing(2, "bfloat16"), "a2a", has_windows=True)
    with pytest.raises(
        ConfigError, match="cp_comm_type must be a2a for a model with attention"
    ):
        recipe._check_context_parallel(sharing(2, "bfloat16"), kind, has_windows=True)


def test_optimizer_on_the_host_is_refused_where_it_cannot_work(monkeypatch):
    values = {"optimizer": "adam", "optimizer_cpu_offload": True}
    monkeypatch.setattr(recipe.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU, there is none"):
        recipe.check_optimizer(sharing(1, "bfloat16"), values)
    monkeypatch.setattr(recipe.torch.cuda, "is_available", lambda: True)
    recipe.check_optimizer(sharing(1, "bfloat16"), values)
    with pytest.raises(ConfigError, match="needs model.dtype bfloat16, got float32"):
        recipe.check_optimizer(sharing(1, "float32"), values)


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        (
            {"optimizer": "soap"},
            "learner.optimizer.optimizer must be adam, sgd or muon, got 'soap': nobody has tried",
        ),
        (
            {"muon_momentum": 0.9},
            "learner.optimizer.muon_momentum has no effect: the optimizer is",
        ),
        (
            {"lion_beta1": 0.9},
            "learner.optimizer.lion_beta1 has no effect: the optimizer is adam",
        ),
        (
            {"sgd_momentum": 0.5},
            "learner.optimizer.sgd_momentum has no effect: the optimizer is",
        ),
        (
            {"optimizer": "sgd", "adam_eps": 1e-6},
            "learner.optimizer.adam_eps has no effect: the optimizer is sgd",
        ),
        (
            {"min_lr": 1e-7},
            "learner.optimizer.min_lr has no effect: the learning rate falls as a",
        ),
        (
            {"loss_scale": 8.0},
            "learner.optimizer.loss_scale has no effect: the loss has no scale",
        ),
        (
            {"pin_cpu_grads": False},
            "learner.optimizer.pin_cpu_grads has no effect: optimizer_cpu_",
        ),
    ],
)
def test_other_optimizers_and_their_settings_are_refused(
    table: dict, cause: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe.check_optimizer(
            small_config(learner={"optimizer": table}), {"optimizer": "adam"} | table
        )
    assert str(caught.value).startswith(cause)


MUON: dict = {"learner": {"optimizer": {"optimizer": "muon"}}}


def muon(**settings: object) -> dict:
    return {"learner": {"optimizer": {"optimizer": "muon", **settings}}}


@pytest.mark.parametrize(
    ("tables", "cause"),
    [
        (
            muon(muon_tp_mode="alone"),
            "muon_tp_mode must be duplicated or distributed or blockwise",
        ),
        (
            muon(muon_scale_mode="width"),
            "learner.optimizer.muon_scale_mode must be spectral or",
        ),
        (
            muon(muon_fp32_matmul_prec="low"),
            "learner.optimizer.muon_fp32_matmul_prec must be",
        ),
        (
            muon(muon_scalar_optimizer="lion"),
            "muon_scalar_optimizer must be adam, got 'lion'",
        ),
        (
            muon(muon_coefficient_type="custom"),
            "learner.optimizer.muon_coefficient_type must be",
        ),
        (
            muon(muon_num_ns_steps=0),
            "learner.optimizer.muon_num_ns_steps must be 1 or more, got 0",
        ),
        (
            muon(muon_momentum=1.0),
            "learner.optimizer.muon_momentum must be 0 to below 1, got 1.0",
        ),
        (
            {
                "learner": MUON["learner"]
                | {"ddp": {"use_distributed_optimizer": True}},
                "model": {"path": "m", "dtype": "float32"},
            },
            "learner.ddp.use_distributed_optimizer: that needs model.dtype bfloat16",
        ),
        (
            MUON | {"model": {"path": "m", "dtype": "float16"}},
            "does not go with model.dtype float",
        ),
        (
            MUON | {"lora": {"rank": 2}},
            "optimizer muon does not go with lora.rank: nobody",
        ),
        (
            {
                "learner": MUON["learner"]
                | {"transformer": {"fp8": "hybrid", "fp8_param": True}}
            },
            "does not go with learner.transformer.fp8_param: nobody",
        ),
    ],
)
def test_what_muon_cannot_do_is_refused_before_ranks_start(
    tables: dict, cause: str
) -> None:
    assert recipe.optimizer_config_of(small_config(**MUON)).muon_tp_mode == "duplicated"
    with pytest.raises(ConfigError) as caught:
        recipe.optimizer_config_of(small_config(**tables))
    assert cause in str(caught.value)


def test_replicas_share_muons_state_by_whole_matrices() -> None:
    config = small_config(
        learner=MUON["learner"] | {"ddp": {"use_distributed_optimizer": True}},
        model={"path": "m", "dtype": "bfloat16"},
    )
    optimizer_config_of = recipe.optimizer_config_of(config)
    assert optimizer_config_of.use_layer_wise_distributed_optimizer
    assert not optimizer_config_of.use_distributed_optimizer
    assert not recipe.ddp_config_of(config).use_distributed_optimizer


def test_muon_without_its_package_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "installed", lambda _: {})
    with pytest.raises(ConfigError, match=r"emerging-optimizers 0\.3\.0 is required"):
        recipe.optimizer_config_of(small_config(**MUON))


def test_a_critics_output_layer_has_adam_as_every_output_layer() -> None:
    settings = SimpleNamespace(
        hidden_size=4, params_dtype=torch.float32, sequence_parallel=False
    )
    head = ValueHead(settings, seed=0, device=torch.device("cpu"))
    assert is_managed_by_layer_wise_optimizer(torch.nn.Linear(4, 1).weight)
    assert not is_managed_by_layer_wise_optimizer(head.weight)
