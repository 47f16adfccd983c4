"""verl's fully asynchronous trainer on two GPUs, as a program of compare.py.

Trainer and rollouter have one GPU each. All that its recipe for a small model leaves open is chosen
for speed: no checkpoint, no validation, micro batches of `--micro-tokens` tokens, weights sent
after every step. This module writes prompts and settings, starts its entry point, follows its file
of metrics, and adds one row to `--rows` after each step. verl_work.py gives the replies their
lengths.

More of verl's settings follow as KEY=VALUE; behind a last `--`, `--cfg job` prints them all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.whole_systems.setup import follow, lines_of, peer_parser
from benchmarks.whole_systems.verl_work import ASKED, COUNTER, GATE
from benchmarks.whole_systems.work import TASKS, Work

MAIN = "verl.experimental.fully_async_policy.fully_async_main"
WORK = "benchmarks.whole_systems.verl_work"
# What a line of verl's metrics says of a step, and by which name a row has it.
TIMES = {
    "timing_s/update_actor": "training_s",
    "timing_s/gen": "waiting_s",
    "timing_s/timing_s/param_sync": "publish_s",
    "fully_async/count/stale_trajectory_processed": "stale_replies",
}
REPLIES = "response_length/mean"
STEP = "training/global_step"


def settings(arguments: argparse.Namespace, work: Work, folder: Path) -> dict[str, Any]:
    """Returns the settings of verl's fully asynchronous trainer; all others are its defaults."""
    longest = max(work.tokens, work.longest)
    prompt = work.prompt_words + 2
    groups = arguments.sequences // arguments.group
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return {
        "data.train_files": str(folder / "prompts.parquet"),
        "data.val_files": str(folder / "prompts.parquet"),
        "data.max_prompt_length": prompt,
        "data.max_response_length": longest,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.model.path": str(arguments.model),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        "critic.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.ppo_mini_batch_size": groups,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": max(arguments.micro_tokens, prompt + longest),
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": "async",
        f"{rollout}.n": arguments.group,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.max_model_len": prompt + longest + 32,
        f"{rollout}.max_num_seqs": arguments.episodes,
        f"{rollout}.gpu_memory_utilization": arguments.memory,
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": arguments.kv_gib << 30,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.agent.agent_loop_config_path": str(folder / "loops.json"),
        "reward.custom_reward_function.path": f"pkg://{WORK}",
        "trainer.logger": '["file"]',
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(folder),
        "trainer.n_gpus_per_node": 1,
        "trainer.total_epochs": 1000,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 1,
        "rollout.total_rollout_steps": 100_000 * groups,
        "async_training.require_batches": 1,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.staleness_threshold": arguments.staleness,
        "async_training.partial_rollout": True,
        "async_training.concurrent_samples_per_replica": arguments.episodes // arguments.group,
        # A cluster of its own. Its actors ask for more cores than they use or a machine has.
        "+ray_kwargs.ray_init.address": "local",
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 4 << 30,
    }


def written(folder: Path, arguments: argparse.Namespace, work: Work) -> list[str]:
    """Writes prompts and loop of replies; returns the command of verl's entry point."""
    import pandas

    prompts = [
        {
            "prompt": work.prompt(task),
            "data_source": "work",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": task},
        }
        for task in range(TASKS)
    ]
    pandas.DataFrame(prompts).to_parquet(folder / "prompts.parquet")
    # Its fully asynchronous trainer asks for the loop of this name, whatever the settings say.
    loops = [{"name": "single_turn_agent", "_target_": f"{WORK}.OneCall"}]
    (folder / "loops.json").write_text(json.dumps(loops))
    (folder / "counter").write_text("0")
    words = [f"{key}={value}" for key, value in settings(arguments, work, folder).items()]
    return [sys.executable, "-m", MAIN, f"hydra.run.dir={folder}/hydra", *words, *arguments.more]


def complete(lines: list[str], sequences: int, times: dict[int, float]) -> list[dict[str, Any]]:
    """Returns one row for each step of which verl has told everything: behind the next step.

    `times` holds when a step's first line, that of its new weights, was seen, in seconds; verl's
    lines have no time.
    """
    found = []
    for line in map(json.loads, lines):
        if line["step"] not in times:
            times[line["step"]] = time.perf_counter()
        told = line["data"]
        if REPLIES not in told:
            continue
        step = round(told[STEP])
        took = times[step] - times[step - 1] if step > 1 else told["timing_s/step"]
        parts = {name: told[key] for key, name in TIMES.items() if key in told}
        tokens = round(told[REPLIES] * sequences)
        found.append({"step": step, "step_s": took, "trained_tokens": tokens, **parts})
    return found


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("more", nargs="*")
    arguments = parser.parse_args()
    folder = arguments.rows.resolve().parent / "verl"
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    environ = {
        **os.environ,
        COUNTER: str(folder / "counter"),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        # The memory of some hosts grows as it is used: Ray would take them for full.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if arguments.gate:
        environ |= {ASKED: str(arguments.asked), GATE: str(arguments.gate)}
    command = written(folder, arguments, Work.of_environ())
    process = subprocess.Popen(command, env=environ)
    times: dict[int, float] = {}
    follow(
        process,
        arguments.rows,
        lambda: complete(lines_of(metrics), arguments.sequences, times),
    )
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
