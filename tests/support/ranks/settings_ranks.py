"""Program of one rank: what Megatron's objects hold after settings were passed through to them."""

import dataclasses
import json
from pathlib import Path

from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config

from support.ranks.parity_layouts import config_of

PASSED = {
    "ddp": {
        "overlap_grad_reduce": True,
        "bucket_size": 12345,
        "grad_reduce_in_fp32": False,
    },
    "optimizer": {
        "adam_beta2": 0.5,
        "decoupled_lr": 1e-7,
        "apply_wd_to_qk_layernorm": True,
    },
    "transformer": {
        "moe_aux_loss_coeff": 0.01,
        "moe_router_dtype": "fp64",
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
}
# Settings that differ from those of the layout one-moe, and part of the message.
REFUSED = {
    "unknown": (
        {"ddp": {"overlap_grad_reduction": True}},
        "unknown key learner.ddp.overlap_grad_r",
    ),
    "unknown-optimizer": (
        {"optimizer": {"adam_beta3": 1.0}},
        "did you mean 'adam_beta",
    ),
    "unknown-transformer": (
        {"transformer": {"moe_z_loss": 1.0}},
        "did you mean 'moe_z_loss_coeff'",
    ),
    "owned": (
        {"transformer": {"tensor_model_parallel_size": 2}},
        "learner.transformer.tensor_model_parallel_size cannot be passed through: "
        "set learner.parallel.tp instead",
    ),
    "fusion": (
        {"transformer": {"moe_router_fusion": True}},
        "learner.transformer.moe_router_fusion needs TransformerEngine, which is not installed",
    ),
    "value-of-the-transformer": (
        {
            "transformer": {
                "recompute_granularity": "selective",
                "recompute_modules": ["heads"],
            }
        },
        "learner.transformer: Megatron refuses it",
    ),
    "recompute": (
        {
            "transformer": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
            }
        },
        "learner.transformer: Megatron refuses it: When using recompute_granularity: full",
    ),
    "offload-and-recompute": (
        {"transformer": {"cpu_offloading": True, "recompute_granularity": "selective"}},
        "learner.transformer: Megatron refuses it: CPU offloading does not work when activation",
    ),
    "value-of-the-optimizer": (
        {"optimizer": {"main_params_dtype": "bfloat16"}},
        "learner.optimizer: Megatron refuses it: main_params_dtype can only be fp32",
    ),
    "value-of-ddp": (
        {"ddp": {"reuse_grad_buf_for_mxfp8_param_ag": True}},
        "learner.ddp: Megatron refuses it: Reuse grad buffer only when",
    ),
    "biases": (
        {"transformer": {"moe_router_bias_update_rate": 0.1}},
        "learner.transformer.moe_router_bias_update_rate must be 0, got 0.1: the routers of model.",
    ),
    "nothing": ({}, ""),
}


def run_rank(folder: Path, job: str) -> None:
    answer: object
    if job == "passed":
        answer = built(config_of("one-moe", folder, learner=PASSED))
    elif job == "names":
        answer = names_of_fields()
    elif job.endswith(".toml"):
        answer = refusal(load_config(folder / job))
    elif job == "mixture":
        answer = mixture(config_of("one-moe", folder))
    else:
        answer = refusal(config_of("one-moe", folder, learner=REFUSED[job][0]))
    (folder / f"{job}.json").write_text(json.dumps(answer))


def refusal(config: Config) -> str:
    from slipstream.learner.trainer.megatron_check import check_settings

    try:
        check_settings(config)
    except ConfigError as error:
        return str(error)
    return ""


def mixture(config: Config) -> dict:
    """How the experts are chosen when nothing is said about it."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    policy = open_policy(config, Launch.from_environment())
    router = policy.chunks[0].module.decoder.layers[0].mlp.router
    names = ("moe_router_dtype", "moe_aux_loss_coeff", "moe_router_pre_softmax")
    values = {name: getattr(router.config, name) for name in names}
    policy.ranks.close()
    return values


def names_of_fields() -> dict[str, list[str]]:
    """What each table of the learner may name in the tested version of Megatron."""
    from slipstream.learner.trainer.ranks import compat, cpu

    cpu.install()
    compat.install()
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    kinds = {
        "ddp": [DistributedDataParallelConfig],
        "optimizer": [OptimizerConfig],
        "transformer": [GPTModelProvider, MLAModelProvider],
    }
    return {
        table: sorted(
            {f.name for kind in own_kinds for f in dataclasses.fields(kind) if f.init}
        )
        for table, own_kinds in kinds.items()
    }


def built(config: Config) -> dict:
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    policy = open_policy(config, Launch.from_environment())
    objects = {
        "ddp": policy.chunks[0].ddp_config,
        "optimizer": policy.optimizer.config,
        "transformer": policy.chunks[0].config,
    }
    facts = {
        section: {key: getattr(objects[section], key) for key in PASSED[section]}
        for section in PASSED
    }
    # Megatron's router really takes it from there.
    facts["router"] = str(
        policy.chunks[0].module.decoder.layers[0].mlp.router.config.moe_router_dtype
    )
    policy.ranks.close()
    return facts
