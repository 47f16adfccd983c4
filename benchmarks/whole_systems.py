"""Trained tokens per second of whole systems on the same work: ours beside TRL's.

A run of each has the same model with random weights, prompts of 128 tokens, group and batch size,
and forced lengths of replies: 512 tokens first, then lognormal with a coefficient of variation of
1, median 256, at most 1,024. GRPO with clipping, no KL, one optimizer step a batch. All systems of
a round are loaded side by side, and then run one after the other: whoever does not run waits at a
gate, with idle GPUs. The first steps of either length do not count, nor do an asynchronous
system's last ones of the fixed length, when others are under way. A figure is the tokens of whole
windows over their time; a window has `max_staleness` + 1 steps, so that waves of replies end in it.

    python benchmarks/whole_systems.py --systems ours trl-async           # two GPUs, 8 minutes
    python benchmarks/whole_systems.py --gpus 1 --systems ours trl-colocated
    python benchmarks/whole_systems.py --device cpu --systems ours trl-async --rounds 1

`ours-fp8` is ours with `rollout_server.quantization = "fp8_per_channel"`, `ours-turns` on one GPU
with `deployment.shared_gpu = "turns"`. TRL 1.16 with datasets, accelerate and Liger must be
importable (`--peer-path`).

Prints one table; benchmarks/results/whole-systems.json is written after every system.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measure import Spread, note, part, progress, settings_of, table, visible, write_result
from shapes import make_apart
from whole_systems_work import NO_SEEDS, Work

NAME = "whole-systems"
HERE = Path(__file__).resolve().parent
START_LIMIT_S = 300.0
END_LIMIT_S = 60.0
TARGET = 3.0
# What a step's time goes to, by the names of the systems.
PARTS = {
    "training_s": "training",
    "waiting_s": "waiting",
    "publish_s": "publish",
    "pause_s": "engine's pause",
    "generated_tokens_per_s": "generated tokens/s",
    "lag_mean": "lag",
    "generate_s": "generation",
    "sync_s": "weights",
    "rest_s": "all else",
    "perf/fwd_bwd_s": "forward and backward",
    "perf/optimizer_s": "optimizer",
    "perf/rollout_wait_s": "waiting",
    "perf/weight_sync_s": "weights",
    "rollout/generated_tok_s": "generated tokens/s",
    "sample/staleness_mean": "lag",
    "sample/dropped_stale_total": "dropped so far",
}


@dataclass
class System:
    """One system of one round: its processes, and the files by which it is led."""

    name: str
    folder: Path
    # The steps that an asynchronous system's replies may lie ahead; 0: synchronous.
    ahead: int
    rows_path: Path
    # The address of its own server; empty: it has none.
    url: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
            return self.asked.exists()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts a program of this system in a session of its own, which `end` ends whole."""
        log = (self.folder / f"log-{len(self.processes)}").open("wb")
        with log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=HERE,
                    env={**os.environ, **environ},
                    start_new_session=True,
                )
            )

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row for each step so far."""
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
        """Ends all programs, the newest first; the whole session if one does not end by itself."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S if self.name.startswith("ours") else 5.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Benchmark:
    """What runs and what was found."""

    arguments: argparse.Namespace
    model: Path
    work: Work
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, folder: Path) -> System:
        """Starts a system, which loads and then waits at its gate."""
        folder.mkdir(parents=True)
        if name.startswith("ours"):
            system = System(name, folder, self.arguments.staleness, folder / name / "metrics.jsonl")
            config = folder / "config.toml"
            config.write_text(our_config(self.arguments, system, self.work, self.model))
            run = [sys.executable, "-m", "slipstream.client.cli", "run", str(config)]
            system.start(run, {"OMP_NUM_THREADS": "1"} if self.on_cpu else {})
            return system
        ahead = self.arguments.staleness if name == "trl-async" else 0
        system = System(name, folder, ahead, folder / "rows.jsonl")
        url = ""
        if name == "trl-async":
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            url = system.url = f"http://127.0.0.1:{port}"
            system.start(server_command(self.arguments, self.model, port), self.peer_environ(1))
        mode = "asynchronous" if url else "colocated"
        command = [sys.executable, str(HERE / "whole_systems_trl.py"), mode]
        files = {"model": self.model, "rows": system.rows_path, "asked": system.asked}
        sizes = {"gate": system.gate, "sequences": self.arguments.sequences, "url": url}
        sizes |= {"group": self.arguments.group, "memory": self.arguments.memory}
        sizes |= {"staleness": ahead, "inflight": self.arguments.episodes}
        for key, value in {**files, **sizes, "micro": self.arguments.peer_micro}.items():
            command += [f"--{key}={value}"]
        system.start([*command, *(["--cpu"] if self.on_cpu else [])], self.peer_environ(0))
        return system

    @property
    def on_cpu(self) -> bool:
        """Whether this is a rehearsal."""
        return bool(self.arguments.device == "cpu")

    def peer_environ(self, gpu: int) -> dict[str, str]:
        """Returns the variables of a program of TRL's on this GPU."""
        paths = [self.arguments.peer_path, str(HERE), os.environ.get("PYTHONPATH", "")]
        environ = {
            **self.work.environ(),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.on_cpu:
            own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", NO_SEEDS: "1"}
            return {**environ, **own, "TORCHDYNAMO_DISABLE": "1"}
        return {**environ, "CUDA_VISIBLE_DEVICES": visible([gpu if self.arguments.gpus > 1 else 0])}

    def run(self, system: System) -> None:
        """Lets a system run for all its steps, and notes what it did."""
        steps = self.arguments.steps
        progress(f"{system.name} runs")
        system.gate.touch()
        system.until(lambda: len(system.rows()) >= steps, f"{steps} steps", self.arguments.run_s)
        self.take(system)

    def take(self, system: System) -> None:
        """Notes the windows of a system, also of one that was cut short."""
        for row in system.rows():
            note(NAME, {"system": system.name, **row})
        for lengths, chosen in windows(system.rows(), self.arguments, system.ahead).items():
            if chosen:
                found = figures(chosen, system.ahead + 1)
                progress(f"{system.name}, {lengths}: {json.dumps(found)}")
                self.runs[f"{system.name}, {lengths}"].append(found)
        self.write()

    def write(self) -> None:
        """Writes what is known by now."""
        record = {
            "settings": settings_of(self.arguments),
            "work": asdict(self.work),
            "runs": self.runs,
            "table": table_of(self.runs),
            "failures": self.failures,
        }
        write_result(NAME, record, self.arguments.out)


def our_config(arguments: argparse.Namespace, system: System, work: Work, model: Path) -> str:
    """Returns the configuration of our run: what a user writes for this work."""
    on_cpu = arguments.device == "cpu"
    longest = max(work.tokens, work.longest)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    work_table = ", ".join(f"{key} = {value}" for key, value in asdict(work).items())
    extra = 'quantization = "fp8_per_channel"\n' if "fp8" in system.name else ""
    if not on_cpu:
        extra += f"gpu_memory_utilization = {arguments.memory}\n"
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
reference = "whole_systems_work:Replies"
args = {{ work = {{ {work_table} }}, asked = "{system.asked}", gate = "{system.gate}" }}
timeout_s = {START_LIMIT_S + arguments.run_s * len(arguments.systems)}
[algorithm]
group_size = {arguments.group}
groups_per_step = {arguments.sequences // arguments.group}
max_staleness = {arguments.staleness}
learning_rate = 1e-6
[sampling]
max_reply_tokens = {longest}
max_episode_tokens = {longest + work.prompt_words + 2}
ignore_eos = true
[controller]
address = "127.0.0.1:{port}"
stall_timeout_s = 1800
sample_every_steps = 1000000
[learner]
micro_batch_tokens = {arguments.micro_tokens}
threads = {1 if on_cpu else 4}
export_final = false
[rollout_server]
max_episodes = {arguments.episodes}
threads = {1 if on_cpu else 4}
drain_timeout_s = 0
{extra}
[weights]
verify_every = 1000000
[checkpoint]
every_steps = 0
[tracking]
trackers = []
"""


def server_command(arguments: argparse.Namespace, model: Path, port: int) -> list[str]:
    """Returns the command of vLLM's server as TRL asks for it."""
    work_limit = 1200 if arguments.device == "cuda" else 256
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
        "max-model-len": work_limit,
        "max-num-seqs": arguments.episodes,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": -1,
    }
    if arguments.device == "cuda":
        settings |= {"gpu-memory-utilization": arguments.memory}
        settings |= {"weight-transfer-config": json.dumps({"backend": "nccl"})}
    own = [f"--{key}={value}" for key, value in settings.items()]
    serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own]
    return serve if arguments.device == "cuda" else [*serve, "--enforce-eager"]


def windows(
    rows: Sequence[dict[str, Any]], arguments: argparse.Namespace, ahead: int
) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps that count, by lengths: whole windows of `ahead` + 1 steps.

    A synchronous system settles in one step; an asynchronous one once its replies under way at the
    start have been trained, and replies of the next lengths begin `ahead` + 1 steps early.
    """
    settle = ahead + 1
    fixed, first_lognormal = arguments.fixed_steps, arguments.fixed_steps + settle
    whole = (fixed - (ahead + 1 if ahead else 0) - settle) // settle * settle
    chosen = {"fixed": [row for row in rows if settle < row["step"] <= settle + whole]}
    rest = [row for row in rows if row["step"] > first_lognormal]
    chosen["lognormal"] = rest[: len(rest) // settle * settle]
    return {lengths: each for lengths, each in chosen.items() if len(each) >= settle}


def figures(rows: Sequence[dict[str, Any]], size: int) -> dict[str, Any]:
    """Returns tokens and seconds of windows of `size` steps, and the mean of each part."""
    cut = [rows[first : first + size] for first in range(0, len(rows), size)]
    speeds = [sum(r["trained_tokens"] for r in w) / sum(r["step_s"] for r in w) for w in cut]
    found: dict[str, Any] = {
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "tokens_per_step": sum(row["trained_tokens"] for row in rows) / len(rows),
        "step_s": sum(row["step_s"] for row in rows) / len(rows),
        "tokens_per_s": sum(r["trained_tokens"] for r in rows) / sum(r["step_s"] for r in rows),
        "windows": speeds,
    }
    for key in PARTS:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            found[key] = sum(values) / len(values)
    return found


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Returns the table: medians of runs, spread of windows, ratios to the best peer."""
    header = ["system, lengths", "trained tokens/s (windows)", "ours over the best peer"]
    header += ["runs", "a step, s", "of it, means"]
    speeds = {row: Spread.of([run["tokens_per_s"] for run in found]) for row, found in runs.items()}
    rows: list[Sequence[object]] = []
    for row, found in sorted(runs.items(), key=lambda item: item[0].split(", ")[::-1]):
        name, lengths = row.split(", ")
        peers = [
            speeds[other].median
            for other in speeds
            if other.startswith("trl") and other.endswith(f", {lengths}")
        ]
        ratio = ""
        if name.startswith("ours") and peers:
            ratio = f"{speeds[row].median / max(peers):.2f}"
        every = [speed for run in found for speed in run["windows"]]
        told = [
            f"{label} {Spread.of([run[key] for run in found]).median:,.2f}"
            for key, label in PARTS.items()
            if all(key in run for run in found)
        ]
        speed = f"{speeds[row].median:,.0f} ({min(every):,.0f}-{max(every):,.0f})"
        step = f"{Spread.of([run['step_s'] for run in found]).median:.2f}"
        rows.append([row, speed, ratio, len(found), step, ", ".join(told)])
    return table(header, [*rows, ["target", "", f"{TARGET:.1f}", "", "", ""]])


@contextlib.contextmanager
def started(found: Benchmark, names: Sequence[str], folder: Path) -> Iterator[list[System]]:
    """Loads the systems of one round side by side, and ends those that are left."""
    systems: list[System] = []
    try:
        for name in names:
            with part(f"start {name}", found.failures):
                systems.append(found.start(name, folder / name))
        yield systems
    finally:
        for system in systems:
            system.end()


def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    """Rounds of all systems, the first one of a round another each time."""
    began_s = time.monotonic()
    work = work_of(arguments)
    shape = "tiny" if arguments.device == "cpu" else arguments.shape
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    found = Benchmark(arguments, make_apart(folder / "model", shape, dtype=dtype), work)
    for number in range(arguments.rounds):
        if number and time.monotonic() - began_s > arguments.limit_s:
            break
        turn = number % len(arguments.systems)
        names = [*arguments.systems[turn:], *arguments.systems[:turn]]
        with started(found, names, folder / f"round-{number}") as systems:
            loaded = []
            for system in systems:
                with part(f"load {system.name}", found.failures):
                    system.until(system.is_loaded, "loading", START_LIMIT_S)
                    loaded.append(system)
            for system in loaded:
                with part(f"run {system.name}", found.failures):
                    try:
                        found.run(system)
                    except TimeoutError:
                        found.take(system)
                        raise
                    finally:
                        system.end()
    found.write()
    print("\n".join(table_of(found.runs)))
    for name in found.failures:
        print(f"FAILED: {name}")


def work_of(arguments: argparse.Namespace) -> Work:
    """Returns the work, which is small in a rehearsal."""
    fixed = arguments.fixed_steps * arguments.sequences
    if arguments.device == "cpu":
        return Work(fixed, tokens=16, median=8.0, longest=32, prompt_words=30, words=250)
    return Work(fixed)


def main() -> None:
    """Runs all systems in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    systems = ("ours", "ours-fp8", "trl-async", "trl-colocated")
    parser.add_argument("--systems", nargs="+", choices=systems, default=["ours", "trl-async"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=0.0, help="no later round begins after")
    parser.add_argument("--run-s", type=float, default=240.0, help="limit of one system's run")
    parser.add_argument("--fixed-steps", type=int, default=20, help="with replies of one length")
    parser.add_argument("--steps", type=int, default=40, help="of both lengths")
    parser.add_argument("--sequences", type=int, help="of a step; 256, on a CPU 16")
    parser.add_argument("--group", type=int, help="16, on a CPU 4")
    parser.add_argument("--episodes", type=int, help="under way; 512, on a CPU 16")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.3, help="GPU memory of each engine")
    parser.add_argument("--micro-tokens", type=int, default=16384, help="of our micro batches")
    parser.add_argument("--peer-micro", type=int, help="sequences; 32, on a CPU 4")
    parser.add_argument("--peer-path", default="", help="folder that holds TRL")
    parser.add_argument("--folder", type=Path, help="of models, runs and logs; a temporary one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.sequences = arguments.sequences or (16 if on_cpu else 256)
    arguments.group = arguments.group or (4 if on_cpu else 16)
    arguments.episodes = arguments.episodes or (16 if on_cpu else 512)
    arguments.peer_micro = arguments.peer_micro or (4 if on_cpu else 32)
    arguments.limit_s = arguments.limit_s or float("inf")
    # The systems' programs have sessions of their own: they end only by `System.end`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if arguments.folder:
        arguments.folder.mkdir(parents=True)
        benchmark(arguments, arguments.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        benchmark(arguments, Path(folder))


if __name__ == "__main__":
    main()
