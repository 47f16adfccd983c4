"""Names of other trainers' settings, for messages on unknown keys."""

# docs/guides/migration.md has a row for each.
_NAMES = {
    "algorithm.learning_rate": "lr",
    "algorithm.group_size": "n num_generations n_samples_per_prompt",
    "algorithm.groups_per_step": "train_batch_size rollout_batch_size",
    "algorithm.epochs": "ppo_epochs num_iterations update_epochs_per_batch",
    "run.steps (an epoch of N tasks is N / algorithm.groups_per_step steps)": (
        "epochs total_epochs num_train_epochs"
    ),
    "run.steps": "total_training_steps max_steps num_rollout",
    "run.name": "experiment_name run_name",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef beta",
    "algorithm.kl.placement": "use_kl_in_reward",
    "algorithm.weight": "rollout_is",
    "algorithm.loss_args.clip_high": "clip_high epsilon_high clip_ratio_high eps_clip_high",
    "algorithm.loss_args.clip_low": "clip_low epsilon clip_ratio_low eps_clip_low eps_clip",
    "algorithm.loss_args.dual_clip": "dual_clip delta clip_ratio_c",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.aggregation": "loss_type loss_agg_mode loss_reduction",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "algorithm.decay": "lr_scheduler_type lr_decay_style",
    "algorithm.max_staleness": "max_staleness_steps staleness_threshold",
    "learner.grad_clip": "max_grad_norm clip_grad",
    "sampling.max_reply_tokens": "max_completion_length max_response_length max_generate_length",
    "sampling.max_prompt_tokens": "max_prompt_length",
    "checkpoint.every_steps": "save_freq save_steps ckpt_interval save_interval",
    "evaluations.0.every_steps": "test_freq eval_interval eval_steps",
    "tracking.trackers": "report_to logger",
}
OURS = {theirs: ours for ours, names in _NAMES.items() for theirs in names.split()}
# Values that other trainers give a setting of the same name.
VALUES = {
    ("algorithm.loss", "grpo"): "grpo is the default advantage, and its loss is ppo",
    ("algorithm.loss", "dr_grpo"): "dr_grpo is an advantage, and its loss is ppo",
    ("algorithm.advantage", "ppo"): "the advantage of PPO is gae, with a critic",
}


def ours_of(name: str, value: object) -> str:
    """Returns a hint at what `name`, or a name in its table `value`, is called here, or ""."""
    if name in OURS:
        return f"what other trainers call {name} is {OURS[name]}"
    inner = value.items() if isinstance(value, dict) else ()
    return next(filter(None, (ours_of(str(key), each) for key, each in inner)), "")
