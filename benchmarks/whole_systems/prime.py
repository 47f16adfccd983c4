"""prime-rl's `rl` on two GPUs, as a program of compare.py.

Its inference server, orchestrator, environment server and trainer start as its own launcher starts
them. This module writes the settings and the commands by those names, follows its metrics, and adds
one row to `--rows` after each step. prime_server.py says what differs for the vLLM that is
installed, prime_work.py what the environment is.

`--learner TOKENS` runs its trainer alone instead, as its own benchmark does: two micro batches of
one random sequence, recomputation, and no weights sent.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.whole_systems.prime_server import ASKED, GATE, THIS
from benchmarks.whole_systems.setup import follow, lines_of, peer_parser
from benchmarks.whole_systems.work import Work

# The commands that prime-rl's launcher starts, and what they run.
COMMANDS = {
    "inference": f"-m {THIS}",
    "orchestrator": "-c 'from prime_rl.entrypoints.orchestrator import main; main()'",
    "env-server": "-c 'from prime_rl.entrypoints.env_server import main; main()'",
    "torchrun": "-m torch.distributed.run",
}
# A plugin of verifiers is a module of its own.
PLUGIN = "whole_systems_work"
TOKENS = "progress/output_tokens"
STEP = "time/step"
TRAINED = "time/forward_backward"
TIMES = {
    TRAINED: "training_s",
    "time/wait_for_batch": "waiting_s",
    "time/broadcast_weights": "publish_s",
}


def settings(arguments: argparse.Namespace, work: Work, folder: Path) -> dict[str, Any]:
    """Returns the settings of prime-rl's `rl` for this work; all others are its defaults.

    Its trainer is spared what saves memory at the cost of time: the model is small.
    """
    longest = max(work.tokens, work.longest) + work.prompt_words + 2
    packed = max(arguments.micro_tokens, longest)
    source = {
        "name": "work",
        # Else it begins with one worker, and starts others while episodes wait.
        "serve": {"pool": {"type": "static", "num_workers": -(-arguments.episodes // 64)}},
        "env": {
            "taskset": {"id": PLUGIN},
            "agent": {"harness": {"id": PLUGIN}, "runtime": {"type": "subprocess"}},
        },
    }
    fast = {"ac": "None", "ac_offloading": "None", "optim_cpu_offload": False}
    model = {"name": str(arguments.model)}
    return {
        "max_steps": 100_000,
        "output_dir": str(folder),
        "run": {"name": "prime"},
        "model": model,
        "tokenizer": model,
        "weight_broadcast": {"type": "nccl"},
        "trainer": {
            "model": {"attn": arguments.attention, "seq_len": packed}
            | ({} if arguments.as_shipped else fast),
            "optim": {"lr": 1e-6},
        },
        "orchestrator": {
            "batch_size": arguments.sequences,
            "group_size": arguments.group,
            "max_off_policy_steps": arguments.staleness,
            # What prime-rl advises where the number is known: else it begins with few and adds.
            "concurrency": dict.fromkeys(
                ("initial_inflight", "min_inflight", "max_inflight"), arguments.episodes
            ),
            "seq_len": packed,
            "renderer": {"name": "default"},
            "train": {
                "sampling": {"max_completion_tokens": max(work.tokens, work.longest)},
                "source": [source],
            },
        },
        "inference": {
            "router": "None",
            "vllm": {
                "max_model_len": longest + 32,
                "enable_scale_out": True,
                "gpu_memory_utilization": arguments.memory,
                "kv_cache_memory_bytes": arguments.kv_gib << 30,
            },
        },
    }


def written(folder: Path, arguments: argparse.Namespace, work: Work) -> Path:
    """Writes settings, commands and the environment's plugin; returns the settings' file."""
    (folder / "bin").mkdir()
    for name, what in COMMANDS.items():
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    names = "from benchmarks.whole_systems.prime_work import"
    (folder / f"{PLUGIN}.py").write_text(f"{names} *\n{names} __all__\n")
    file = folder / "settings.json"
    file.write_text(json.dumps(settings(arguments, work, folder), indent=1))
    return file


def complete(lines: list[str]) -> list[dict[str, Any]]:
    """Returns one row for each step of which trainer and orchestrator have told everything.

    Both write to one file, and both time their steps.
    """
    trained: dict[int, dict[str, Any]] = {}
    tokens: dict[int, float] = {}
    for row in map(json.loads, lines):
        if TRAINED in row:
            trained[row["step"]] = row
        if TOKENS in row:
            tokens[row["step"]] = row[TOKENS]
    found = []
    for step, row in sorted(trained.items()):
        if step in tokens:
            before = trained.get(step - 1)
            took = row["time"] - before["time"] if before else row[STEP]
            parts = {name: row[key] for key, name in TIMES.items()}
            found.append({"step": step, "step_s": took, "trained_tokens": tokens[step], **parts})
    return found


def errors(folder: Path) -> list[str]:
    """Returns the last errors in the log of each program: the launcher's own log has none."""
    found = []
    for path in sorted(folder.rglob("*.log")):
        lines = [line for line in lines_of(path) if re.search(r"\w(Error|Exception)\b", line)]
        found += [f"{path.name}:", *list(dict.fromkeys(lines))[-4:]]
    return found


def learner(arguments: argparse.Namespace, folder: Path) -> None:
    """Runs the trainer alone on random tokens, for four steps, as prime-rl's benchmark does."""
    words = [
        "--model.name",
        str(arguments.model),
        "--model.seq-len",
        str(arguments.learner),
        "--model.attn",
        arguments.attention,
        "--max-steps",
        "4",
        "--model.compile",
        "--output-dir",
        str(folder),
        "--monitors.file.path",
        "metrics.jsonl",
        "--model.ac",
        "--data.fake.batch-size",
        "2",
    ]
    if not arguments.as_shipped:
        words += ["--model.ac-offloading", "None", "--no-model.optim-cpu-offload"]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    run += [f"--master-port={arguments.port}", "-m", "prime_rl.trainer.rl.train", *words]
    subprocess.run(run, check=True)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if {"perf/throughput", STEP} & set(row):
            print(json.dumps(row))


def main() -> None:
    parser = peer_parser(__doc__)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--attention", default="flash_attention_2", help="or _4, if it is there")
    parser.add_argument("--learner", type=int, default=0, help="tokens of its sequences")
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument("--as-shipped", action="store_true", help="with what saves memory")
    arguments = parser.parse_args()
    folder = arguments.rows.resolve().parent / "prime"
    folder.mkdir(parents=True)
    if arguments.learner:
        learner(arguments, folder)
        return
    file = written(folder, arguments, Work.of_environ())
    environ = dict(os.environ)
    environ["PATH"] = os.pathsep.join([str(folder / "bin"), environ["PATH"]])
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), environ.get("PYTHONPATH", "")])
    if arguments.gate:
        environ |= {ASKED: str(arguments.asked), GATE: str(arguments.gate)}
    run = "from prime_rl.entrypoints.rl import main; main()"
    process = subprocess.Popen([sys.executable, "-c", run, "@", str(file)], env=environ)
    metrics = folder / "prime" / "metrics.jsonl"
    follow(process, arguments.rows, lambda: complete(lines_of(metrics)))
    if process.returncode:
        print("\n".join(errors(folder)))
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
