"""Names of other trainers' settings, and of our own former ones, for messages on unknown keys."""

from collections.abc import Sequence
from typing import Any

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
# What holds in place of settings that were removed, by their names without places in lists.
_REMOVED = {
    "algorithm.decay_steps": "algorithm.decay falls from the warmup to the end",
    "algorithm.decay_to": "algorithm.decay falls to 0",
    "algorithm.max_filtered_batches": "a batch may cost the groups of 20 steps",
    "algorithm.solved_reward": "1 is the full reward",
    "checkpoint.keep_batches": "all batches are kept",
    "controller.min_group_share": "half of a group, and two members, must finish",
    **dict.fromkeys(
        (f"critic.{name}" for name in ("weight_decay", "grad_clip", "ddp", "optimizer")),
        "the critic has the learner's",
    ),
    "critic.transformer": "the critic has the learner's",
    **dict.fromkeys(
        ("critic.parallel.etp", "reference.parallel.etp"), "learner.parallel.etp is for all models"
    ),
    **dict.fromkeys(
        ("critic.parallel.vpp", "reference.parallel.vpp"), "only the policy has virtual stages"
    ),
    "debug.head_dtype": "logits are float32",
    "debug.probe_tolerance": "the bound follows from model.dtype and quantization",
    "debug.profile.details": "a profile has times alone",
    "debug.profile.ranks": "all ranks are profiled",
    "debug.stage_on_server": "weights are staged where there is room",
    "environments.algorithm": "all environments have the run's algorithm",
    **dict.fromkeys(("environments.audit", "evaluations.audit"), "run.audit is for all"),
    "evaluations.pass_at": "k are samples_per_task and the powers of two below",
    "evaluations.pass_reward": "a reply passes with a reward of 1",
    "reference.server.max_open": "a server has 16 open calls at most",
    "reference.transformer": "the reference has the learner's",
    "run.changed_functions": 'run.resume = "changed" goes on with them',
    "security.allow_public_addresses": "addresses must be private",
    "tracking.traces_url": "trace.json in the run's folder has the newest sampled step",
}
# Values that other trainers give a setting of the same name.
VALUES = {
    ("algorithm.loss", "grpo"): "grpo is the default advantage, and its loss is ppo",
    ("algorithm.loss", "dr_grpo"): "dr_grpo is an advantage, and its loss is ppo",
    ("algorithm.advantage", "ppo"): "the advantage of PPO is gae, with a critic",
}


def removed(path: Sequence[int | str]) -> str:
    """Returns what holds in place of the removed setting at `path`, or "" if none was there."""
    reason = _REMOVED.get(".".join(part for part in path if isinstance(part, str)))
    return f"the setting was removed: {reason}" if reason else ""


def without_removed(table: dict[str, Any], above: tuple[str, ...] = ()) -> list[str]:
    """Takes the removed settings out of `table`, found below the tables `above`.

    Returns their names. For files that a run of an earlier version wrote: it wrote all settings.
    """
    found = []
    for name, value in list(table.items()):
        path = (*above, name)
        if removed(path):
            found.append(".".join(path))
            del table[name]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                found += without_removed(each, path)
    return found


def ours_of(name: str, value: object) -> str:
    """Returns a hint at what `name`, or a name in its table `value`, is called here, or ""."""
    if name in OURS:
        return f"what other trainers call {name} is {OURS[name]}"
    inner = value.items() if isinstance(value, dict) else ()
    return next(filter(None, (ours_of(str(key), each) for key, each in inner)), "")
