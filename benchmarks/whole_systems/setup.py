"""The programs of whole systems side by side: how each is configured, started and ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from slipstream.core.machine.address import free_port

from benchmarks.common.measure import ROOT, toml_of
from benchmarks.whole_systems.work import Work

START_LIMIT_S = 480.0
END_LIMIT_S = 30.0


@dataclass
class System:
    """One system of one round: its processes, and the files by which it is led."""

    name: str
    folder: Path
    # The steps that an asynchronous system's replies may lie ahead; 0: synchronous.
    ahead: int
    rows_path: Path
    # Its work; its steps with replies of one length, and all its steps.
    work: Work
    fixed_steps: int
    steps: int
    # The steps that all replies under way last for.
    wave: int = 1
    # The address of its own server; empty: it has none.
    url: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def window(self, lengths: str) -> int:
        """Returns the steps of a window: all that may lie ahead, after which late replies come.

        `lengths`: "fixed", whose window holds whole waves of replies, or "lognormal".
        """
        wave = self.wave if lengths == "fixed" else 1
        return -(-(self.ahead + 1) // wave) * wave if self.ahead else 1

    @property
    def asked(self) -> Path:
        """The file that says that everything is loaded."""
        return self.folder / "asked"

    @property
    def gate(self) -> Path:
        """The file that lets the system run."""
        return self.folder / "gate"

    def is_loaded(self) -> bool:
        """Whether everything is loaded, a server of its own too."""
        if not self.asked.exists() or not self.url:
            # Ours tries its environment before it has a server.
            is_ours = self.name.startswith("ours")
            return self.asked.exists() and (not is_ours or " joined" in self.log(0))
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts a program of this system in a session of its own; `end` ends it."""
        log = (self.folder / f"log-{len(self.processes)}").open("wb")
        with log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env={**os.environ, **environ},
                    start_new_session=True,
                )
            )

    def rows(self) -> list[dict[str, Any]]:
        if not self.rows_path.exists():
            return []
        lines = self.rows_path.read_text().split("\n")[:-1]
        return [row for row in map(json.loads, lines) if row.get("step_s") is not None]

    def until(self, reached: Callable[[], bool], what: str, limit_s: float) -> None:
        """Waits until `reached()`; RuntimeError with the end of a log when a program has ended."""
        end = time.monotonic() + limit_s
        while not reached():
            for place, process in enumerate(self.processes):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{self.name} ended with {process.poll()}: {self.log(place)}"
                    )
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: {what} took over {limit_s:g} s: {self.log(-1)}")
            time.sleep(0.1)

    def log(self, place: int) -> str:
        """Returns the end of what a program has written."""
        place %= len(self.processes)
        return (self.folder / f"log-{place}").read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Kills all programs and what they started: their orderly end takes long, and counts not.

        The GPUs are free afterwards.
        """
        roots = [psutil.Process(p.pid) for p in self.processes if p.poll() is None]
        found = [*roots, *(child for root in roots for child in root.children(recursive=True))]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=END_LIMIT_S)
        for program in self.processes:
            program.wait(END_LIMIT_S)


def peer_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of what compare.py tells every peer's program."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--asked", type=Path)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--kv-gib", type=int, default=34)
    return parser


def follow(
    process: subprocess.Popen[bytes], path: Path, rows: Callable[[], list[dict[str, Any]]]
) -> None:
    """Adds new ones of `rows()`, one a step, to the file at `path` until the process ends."""
    told = 0
    while process.poll() is None:
        time.sleep(0.05)
        found = rows()
        with path.open("a") as file:
            for row in found[told:]:
                print(json.dumps(row), file=file, flush=True)
        told = len(found)


def lines_of(path: Path) -> list[str]:
    """Returns the complete lines of a file that may not exist yet."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def work_of(arguments: argparse.Namespace, fixed_steps: int) -> Work:
    """Returns the work of one system, which is small in a rehearsal."""
    fixed = fixed_steps * arguments.sequences
    if arguments.device == "cpu":
        return Work(fixed, tokens=16, median=8.0, longest=32, prompt_words=30, words=250)
    return Work(fixed)


def our_config(arguments: argparse.Namespace, system: System, model: Path) -> str:
    """Returns the configuration of our run: what a user writes for this work."""
    work = system.work
    on_cpu = arguments.device == "cpu"
    words = system.name.split("-")
    turns = next((word for word in words if word in ("off", "pause", "sleep")), "auto")
    longest = max(work.tokens, work.longest)
    work_table = ", ".join(f"{key} = {value}" for key, value in asdict(work).items())
    extra = 'quantization = "fp8_per_channel"\n' if "fp8" in words else ""
    packed = ""
    threads = 1 if on_cpu else 4
    if "defaults" not in words:
        packed = f"micro_batch_tokens = {arguments.micro_tokens}\nthreads = {threads}\n"
        extra += f"max_episodes = {arguments.episodes}\nthreads = {threads}\n"
    if "both" in words or arguments.servers > 1:
        extra += f"count = {max(2, arguments.servers)}\n"
    for key, value in json.loads(arguments.learner).items():
        packed += f"{key} = {toml_of(value)}\n"
    if not on_cpu and "defaults" not in words:
        # The second server samples beside the learner.
        if "both" in words:
            extra += "devices = [1, 0]\n"
        cache = ', kv_cache_dtype = "fp8"' if "kv8" in words else ""
        cache += ', attention_config = { backend = "FLASH_ATTN" }' if "flash" in words else ""
        extra += f"gpu_memory_utilization = {arguments.memory}\n"
        extra += f"engine = {{ kv_cache_memory_bytes = {arguments.kv_gib << 30}{cache} }}\n"
    return f"""
[run]
name = "{system.name}"
dir = "{system.folder}"
steps = 100000
[model]
path = "{model}"
dtype = "{"float32" if on_cpu else "bfloat16"}"
[[environments]]
name = "work"
reference = "benchmarks.whole_systems.work:Replies"
args = {{ work = {{ {work_table} }}, asked = "{system.asked}", gate = "{system.gate}" }}
timeout_s = {START_LIMIT_S + arguments.run_s * len(arguments.systems)}
[algorithm]
group_size = {arguments.group}
groups_per_step = {arguments.sequences // arguments.group}
max_staleness = {arguments.staleness}
learning_rate = 1e-6
agreement = "{"bits" if "bits" in words else "close"}"
[sampling]
max_reply_tokens = {longest}
max_episode_tokens = {longest + work.prompt_words + 2}
[debug]
ignore_eos = true
[controller]
address = "127.0.0.1:{free_port("127.0.0.1")}"
stall_timeout_s = 1800
turns = "{turns}"
sample_every_steps = 1000000
[learner]
export_final = false
{packed}{"devices = [0]" if "both" in words and not on_cpu else ""}
[rollout_server]
drain_timeout_s = 0
{extra}
[weights]
verify_every = 1000000
[checkpoint]
every_steps = 0
[tracking]
trackers = []
"""


def server_command(
    arguments: argparse.Namespace, system: System, model: Path, port: int
) -> list[str]:
    """Returns the command of vLLM's server as TRL asks for it."""
    work = system.work
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
        "max-model-len": max(work.tokens, work.longest) + work.prompt_words + 34,
        "max-num-seqs": arguments.episodes,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
    }
    if arguments.device == "cuda":
        settings |= {"gpu-memory-utilization": arguments.memory}
        settings |= {"kv-cache-memory-bytes": arguments.kv_gib << 30}
        settings |= {"weight-transfer-config": json.dumps({"backend": "nccl"})}
        settings |= {"worker-extension-cls": "benchmarks.common.older_nccl.Extension"}
    own = [f"--{key}={value}" for key, value in settings.items()]
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own]
    return serve if arguments.device == "cuda" else [*serve, "--enforce-eager"]
