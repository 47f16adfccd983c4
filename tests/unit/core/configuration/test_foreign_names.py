"""Settings that users bring along from other trainers and from earlier releases."""

import tomllib
from pathlib import Path

import pytest
from slipstream.core.configuration.config_file import load_config
from slipstream.core.configuration.foreign_names import (
    EARLIER_RELEASE,
    ForeignName,
    explain,
    foreign_names,
)
from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import Config
from support.rigs.setting_names import setting_exists

START = ["run.steps=4", "model.path=models/tiny", 'environments=[{reference="a.b:C"}]']
EVALUATION = 'evaluations=[{reference="a.b:C", every_steps=1}]'
# A name as somebody types it, and the setting that the line must name.
TYPED = {
    "run.epochs": "run.steps",
    "trainer.total_epochs": "run.steps",
    "max_steps": "run.steps",
    "num_train_epochs": "run.steps",
    "grpo.max_num_steps": "run.steps",
    "model.name": "model.path",
    "policy.model_name": "model.path",
    "model_name": "model.path",
    "hf_checkpoint": "model.path",
    "pretrain": "model.path",
    "algorithm.mini_batch_size": "algorithm.mini_batches",
    "algorithm.ppo_mini_batch_size": "algorithm.mini_batches",
    "global_batch_size": "algorithm.mini_batches",
    "algorithm.train_batch_size": "algorithm.groups_per_step",
    "rollout_batch_size": "algorithm.groups_per_step",
    "batch_size": "algorithm.groups_per_step",
    "orchestrator.batch_size": "algorithm.groups_per_step",
    "num_prompts_per_step": "algorithm.groups_per_step",
    "algorithm.num_generations": "algorithm.group_size",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "rollouts_per_example": "algorithm.group_size",
    "gconfig.n_samples": "algorithm.group_size",
    "algorithm.max_off_policy_steps": "algorithm.max_staleness",
    "algorithm.staleness_threshold": "algorithm.max_staleness",
    "max_staleness_steps": "algorithm.max_staleness",
    "max_trajectory_age_steps": "algorithm.max_staleness",
    "max_head_offpolicyness": "algorithm.max_staleness",
    "algorithm.clip_ratio": "algorithm.loss_args",
    "clip_ratio_high": "algorithm.loss_args",
    "eps_clip": "algorithm.loss_args",
    "epsilon_high": "algorithm.loss_args",
    "algorithm.lr": "algorithm.learning_rate",
    "actor_learning_rate": "algorithm.learning_rate",
    "warmup_ratio": "algorithm.warmup_steps",
    "lr_scheduler_type": "algorithm.decay",
    "learner.max_grad_norm": "learner.grad_clip",
    "clip_grad": "learner.grad_clip",
    "betas": "learner.optimizer",
    "algorithm.init_kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "beta": "algorithm.kl.coefficient",
    "kl_loss_type": "algorithm.kl.estimator",
    "use_kl_in_reward": "algorithm.kl.placement",
    "adv_estimator": "algorithm.advantage",
    "loss_agg_mode": "algorithm.aggregation",
    "calculate_per_token_loss": "algorithm.aggregation",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "icepop": "algorithm.weight_args",
    "tis_imp_ratio_cap": "algorithm.weight_args",
    "use_tis": "algorithm.weight",
    "filter_groups.enable": "algorithm.filter",
    "dynamic_filtering": "algorithm.filter",
    "overlong_buffer_len": "algorithm.reward_args",
    "mask_truncated_completions": "algorithm.leave_out_truncated",
    "use_rollout_routing_replay": "algorithm.router_replay",
    "sampling.max_tokens": "sampling.max_reply_tokens",
    "sampling.max_completion_tokens": "sampling.max_reply_tokens",
    "max_completion_length": "sampling.max_reply_tokens",
    "data.max_response_length": "sampling.max_reply_tokens",
    "max_new_tokens": "sampling.max_reply_tokens",
    "data.max_prompt_length": "sampling.max_prompt_tokens",
    "seq_len": "sampling.max_episode_tokens",
    "max_model_len": "sampling.max_episode_tokens",
    "max_tool_calling_iterations": "sampling.max_turns",
    "max_tokens_per_gpu": "learner.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "learner.tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "ulysses_sequence_parallel_size": "learner.parallel.cp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "n_gpus_per_node": "learner.ranks_per_node",
    "num_train_gpus": "learner.world_size",
    "num_engines": "rollout_server.count",
    "rollout_num_gpus": "rollout_server.count",
    "max_num_seqs": "rollout_server.max_episodes",
    "free_cache_engine": "controller.turns",
    "vllm_enable_sleep_mode": "controller.turns",
    "save_freq": "checkpoint.every_steps",
    "ckpt_interval": "checkpoint.every_steps",
    "test_freq": "evaluations.every_steps",
    "report_to": "tracking.trackers",
    "project_name": "tracking.project",
    "experiment_name": "run.name",
    "peft_config": "lora.rank",
    "use_peft": "lora.rank",
    "lora_r": "lora.rank",
    "dataset_name": "environments.args",
    "model_name_or_path": "model.path",
    "use_rollout_log_probs": "algorithm.loss_args",
    "optimizer_cpu_offload": "learner.optimizer",
    "update_weight_buffer_size": "weights.bucket_mib",
    "use_fault_tolerance": "is started again",
    "load_in_4bit": "has no setting here: LoRA is in 16 bits",
    "gradient_checkpointing": "memory decides",
    "use_remove_padding": "always packed",
    "num_iterations": "algorithm.epochs",
    "importance_sampling_level": "algorithm.loss",
    "per_device_train_batch_size": "algorithm.groups_per_step",
    "save_total_limit": "checkpoint.keep_last",
    "lora_alpha": "lora.alpha",
    "output_dir": "run.dir",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "learner.transformer",
    "deepspeed": "the learner is Megatron-Core",
    "fsdp_config": "the learner is Megatron-Core",
    "async_generate": "algorithm.max_staleness",
    "dynamic_sample": "algorithm.filter",
    "max_resample_times": "20 steps' worth of groups",
    "overlong_filter": "algorithm.leave_out_truncated",
    "soft_cache_length": "algorithm.reward_args",
    "soft_max_length": "sampling.max_reply_tokens",
    "sleep_level": "controller.turns",
    "multi_turn_scheduler": "environments.reference",
    "async_generation_ratio": "algorithm.max_staleness",
    "num_return_sequences_in_group": "algorithm.group_size",
    "ppo_epochs": "algorithm.epochs",
    "lambd": "algorithm.advantage_args",
    "ref_reward_offload": "stays on the trainer's ranks",
    "critic_learning_rate": "critic.learning_rate",
    "reference_policy_kl_penalty": "algorithm.kl.coefficient",
    "ratio_clip_c": "algorithm.loss_args",
    "use_leave_one_out_baseline": "algorithm.advantage",
    "val_period": "evaluations.every_steps",
}


SCRIPTS = tomllib.loads(
    (Path(__file__).parents[3] / "data" / "foreign_scripts.toml").read_text(
        encoding="utf-8"
    )
)
# Trainers whose scripts also have settings of another table.
WIDER = {"TRL": ("AsyncGRPOConfig",), "Unsloth": ("TRL",)}


@pytest.mark.parametrize(
    ("trainer", "script"),
    [(trainer, script) for trainer, scripts in SCRIPTS.items() for script in scripts],
)
def test_every_setting_of_a_published_script_has_a_row(
    trainer: str, script: str
) -> None:
    tables = {trainer, *WIDER.get(trainer, ())}
    known = {
        row.name.lstrip("-").replace("-", "_")
        for row in foreign_names()
        if row.trainer in tables
    }
    names = SCRIPTS[trainer][script]
    missing = [
        name for name in names if name.lstrip("-").replace("-", "_") not in known
    ]
    assert missing == []


@pytest.mark.parametrize(("typed", "setting"), TYPED.items())
def test_a_name_of_another_trainer_leads_to_our_setting(
    typed: str, setting: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*START, f"{typed}=1"])
    assert setting in str(refused.value)
    assert "did you mean" not in str(refused.value)
    assert "\n" not in str(refused.value)


EARLIER = [row for row in foreign_names() if row.trainer == EARLIER_RELEASE]


@pytest.mark.parametrize("row", EARLIER, ids=[row.name for row in EARLIER])
def test_every_setting_that_went_is_told_by_name(row: ForeignName) -> None:
    table, _, rest = row.name.partition(".")
    is_list = table in ("environments", "evaluations") and rest
    typed = f"{table}.0.{rest}" if is_list else row.name
    with pytest.raises(ConfigError) as refused:
        load_config(None, [*START, EVALUATION, f"{typed}=1"])
    assert f"{EARLIER_RELEASE}'s {row.name} {row.meaning}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_counterpart_is_a_setting() -> None:
    missing = [
        (row.name, setting)
        for row in foreign_names()
        for setting in row.settings
        if not setting_exists(setting)
    ]
    assert missing == []
    assert [
        row.name for row in foreign_names() if not row.settings and not row.note
    ] == []


def test_no_name_of_an_earlier_release_is_a_setting_today() -> None:
    assert len(EARLIER) > 80
    assert [row.name for row in EARLIER if setting_exists(row.name)] == []


def test_our_own_slips_are_not_taken_for_names_of_others() -> None:
    for typed, meant in {
        "run.stpes": "steps",
        "algoritm.group_size": "algorithm",
    }.items():
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            load_config(None, [*START, f"{typed}=1"])


def test_a_name_with_many_meanings_has_none() -> None:
    assert explain("run.enable_x") == ""
    assert explain("something.path") == ""
    assert set(Config.model_fields) >= {"run", "algorithm"}
