"""Trained tokens per second of whole systems on the same work: ours beside TRL, prime-rl and verl.

A run of each has the same model with random weights, prompts of 128 tokens, group and batch size,
and forced lengths of replies: 512 tokens first, then lognormal with a coefficient of variation of
1, median 256, at most 1,024. GRPO with clipping, no KL, one optimizer step a batch. All systems of
a round are loaded side by side, and then run one after the other: whoever does not run waits at a
gate, with idle GPUs. The first steps of either length do not count, nor do an asynchronous
system's last ones of the fixed length, when others are under way. A figure is the tokens of whole
windows over their time; a window has `max_staleness` + 1 steps, after which an asynchronous trainer
waits for the same groups again, or a few more, so that waves of replies of one length end with it.

    python -m benchmarks.whole_systems.compare --systems ours trl-async   # two GPUs, 8 minutes
    python -m benchmarks.whole_systems.compare --gpus 1 --systems ours ours-off trl-colocated
    python -m benchmarks.whole_systems.compare --device cpu --systems ours trl-async --rounds 1
    python -m benchmarks.whole_systems.compare --gpus 4 --learner '{"world_size": 2}' --servers 2 \
        --systems ours-defaults --rounds 1
    python -m benchmarks.whole_systems.compare --gpus 4 --shape qwen3-moe --layers 12 --servers 2 \
        --learner '{"world_size": 2, "parallel": {"ep": 2}}' --systems ours-defaults --rounds 1

`ours-fp8` is ours with `rollout_server.quantization = "fp8_per_channel"`, `ours-kv8` with the KV
cache in FP8, `ours-flash` with vLLM's own attention, `ours-bits` with `algorithm.agreement =
"bits"`. `ours-off`, `ours-pause` and
`ours-sleep` have that value of `controller.turns`. `ours-both` has a second rollout server, on the
learner's GPU. `ours-defaults` leaves micro batches, episodes, threads, memory and a second server
to the run, and must be the only system. These words go together: `ours-both-kv8-off`. TRL 1.16
with datasets, accelerate and Liger, and prime-rl or verl as peers.py brings them, must be
importable (`--peer-path FOLDER`; `--peer-path verl=FOLDER` once for each of several).

Prints one table; benchmarks/results/whole-systems-GPUS.json is written after every system.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.machine.address import free_port

from benchmarks.agreement.family_shapes import FAMILIES
from benchmarks.common.measure import (
    ROOT,
    note,
    part,
    program,
    progress,
    settings_of,
    visible,
    write_result,
)
from benchmarks.common.shapes import SHAPES, make_apart
from benchmarks.whole_systems.setup import (
    START_LIMIT_S,
    System,
    our_config,
    server_command,
    work_of,
)
from benchmarks.whole_systems.tables import fewest_fixed_steps, figures, table_of, windows
from benchmarks.whole_systems.work import NO_SEEDS, Work

NAME = "whole-systems"
# The work has 150,000 words; families have smaller vocabularies elsewhere.
QWEN_VOCAB = 151936
PEERS = ("trl-async", "trl-colocated", "prime-rl", "verl")
# What may follow `ours`, with hyphens between.
WORDS = {"bits", "flash", "fp8", "kv8", "both", "defaults", "off", "pause", "sleep"}


@dataclass
class Benchmark:
    """What runs and what was found."""

    arguments: argparse.Namespace
    model: Path
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, folder: Path) -> System:
        """Starts a system, which loads and then waits at its gate."""
        folder.mkdir(parents=True)
        is_ours = name.startswith("ours")
        ahead = 0 if name == "trl-colocated" else self.arguments.staleness
        # Steps of a synchronous system hardly differ: a third of them is enough.
        fixed, steps = (
            each if ahead else each // 3
            for each in (self.arguments.fixed_steps, self.arguments.steps)
        )
        rows = folder / (f"{name}/metrics.jsonl" if is_ours else "rows.jsonl")
        work = work_of(self.arguments, fixed)
        wave = max(1, self.arguments.episodes // self.arguments.sequences)
        system = System(name, folder, ahead, rows, work, fixed, steps, wave)
        fewest = fewest_fixed_steps(system)
        if fixed < fewest:
            progress(f"{name} gets no row for fixed lengths: it has {fixed} steps, not {fewest}")
        if is_ours:
            config = folder / "config.toml"
            config.write_text(our_config(self.arguments, system, self.model))
            run = [sys.executable, "-m", "slipstream.client.cli", "run", str(config)]
            system.start(run, self.device_environ(*range(max(2, self.arguments.gpus))))
            return system
        if name in ("prime-rl", "verl"):
            sizes = {"kv-gib": self.arguments.kv_gib, "memory": self.arguments.memory}
            sizes |= {"episodes": self.arguments.episodes}
            sizes |= {"micro-tokens": self.arguments.micro_tokens}
            command = self.peer_command("verl" if name == "verl" else "prime", system, sizes)
            environ = self.peer_environ(name, work, 0, 1)
            # vLLM's own routes for weights would be asked in place of prime-rl's.
            del environ["VLLM_SERVER_DEV_MODE"]
            system.start(command, environ)
            return system
        sizes = {"micro": self.arguments.peer_micro}
        if name == "trl-colocated":
            sizes |= {"memory": self.arguments.memory, "kv-gib": self.arguments.kv_gib}
            command = self.peer_command("trl_colocated", system, sizes)
        else:
            port = free_port("127.0.0.1")
            system.url = f"http://127.0.0.1:{port}"
            serve = server_command(self.arguments, system, self.model, port)
            system.start(serve, self.peer_environ(name, work, 1))
            sizes |= {"url": system.url, "inflight": self.arguments.episodes}
            command = self.peer_command("trl", system, sizes)
        system.start(
            [*command, *(["--cpu"] if self.on_cpu else [])], self.peer_environ(name, work, 0)
        )
        return system

    def peer_command(self, module: str, system: System, more: Mapping[str, Any]) -> list[str]:
        """Returns the command of a peer's program, which `module` of this folder is."""
        files = {"model": self.model, "rows": system.rows_path, "asked": system.asked}
        sizes = {"gate": system.gate, "sequences": self.arguments.sequences}
        sizes |= {"group": self.arguments.group, "staleness": system.ahead}
        words = [f"--{key}={value}" for key, value in {**files, **sizes, **more}.items()]
        return [*program(f"whole_systems.{module}"), *words]

    @property
    def on_cpu(self) -> bool:
        """Whether this is a rehearsal."""
        return bool(self.arguments.device == "cpu")

    def device_environ(self, *gpus: int) -> dict[str, str]:
        """Returns the variables of programs on these GPUs, or on the only one."""
        if self.on_cpu:
            return {"OMP_NUM_THREADS": "1"}
        return {"CUDA_VISIBLE_DEVICES": visible(gpus if self.arguments.gpus > 1 else [0])}

    def peer_environ(self, name: str, work: Work, *gpus: int) -> dict[str, str]:
        """Returns the variables of a program of the peer `name` on these GPUs."""
        given = [each.rpartition("=") for each in self.arguments.peer_path]
        folders = [folder for peer, _, folder in given if peer in ("", name)]
        paths = [*folders, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = {
            **work.environ(),
            **self.device_environ(*gpus),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.on_cpu:
            environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", NO_SEEDS: "1", "TORCHDYNAMO_DISABLE": "1"}
        return environ

    def run(self, system: System) -> None:
        """Lets a system run for all its steps, notes what it did, and ends it."""
        steps = system.steps
        progress(f"{system.name} runs")
        system.gate.touch()
        try:
            system.until(
                lambda: len(system.rows()) >= steps, f"{steps} steps", self.arguments.run_s
            )
            self.take(system)
        except (TimeoutError, SystemExit):
            # What the time was enough for counts.
            self.take(system)
            raise
        finally:
            system.end()

    def take(self, system: System) -> None:
        """Notes the windows of a system, also of one that was cut short."""
        for row in system.rows():
            note(NAME, {"system": system.name, **row})
        for lengths, chosen in windows(system).items():
            if chosen:
                found = figures(chosen, system.window(lengths))
                progress(f"{system.name}, {lengths}: {json.dumps(found)}")
                self.runs[f"{system.name}, {lengths}"].append(found)
        self.write()

    def write(self) -> None:
        record = {
            "settings": settings_of(self.arguments),
            "runs": self.runs,
            "table": table_of(self.runs),
            "failures": self.failures,
        }
        write_result(f"{NAME}-{self.arguments.gpus}", record, self.arguments.out)


def benchmark(arguments: argparse.Namespace, folder: Path) -> None:
    """Rounds of all systems, the first one of a round another each time."""
    began_s = time.monotonic()
    is_dense = arguments.shape in SHAPES
    shape = "tiny" if arguments.device == "cpu" and is_dense else arguments.shape
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    if shape in SHAPES:
        model = make_apart(folder / "model", shape, dtype=dtype, layers=arguments.layers)
    else:
        model = folder / "model"
        values = json.dumps({} if arguments.device == "cpu" else {"vocab_size": QWEN_VOCAB})
        sizes = ["--tiny"] if arguments.device == "cpu" else ["--layers", str(arguments.layers)]
        make = [*program("agreement.family_shapes"), shape, str(model), "--values", values, *sizes]
        subprocess.run(make, check=True)
    found = Benchmark(arguments, model)
    for number in range(arguments.rounds):
        if number and time.monotonic() - began_s > arguments.limit_s:
            break
        turn = number % len(arguments.systems)
        names = [*arguments.systems[turn:], *arguments.systems[:turn]]
        systems: list[System] = []
        try:
            # They load side by side.
            for name in names:
                with part(f"start {name}", found.failures):
                    systems.append(found.start(name, folder / f"round-{number}" / name))
            loaded = []
            for system in systems:
                with part(f"load {system.name}", found.failures):
                    system.until(system.is_loaded, "loading", START_LIMIT_S)
                    loaded.append(system)
            for system in loaded:
                with part(f"run {system.name}", found.failures):
                    found.run(system)
        finally:
            for system in systems:
                system.end()
    found.write()
    print("\n".join(table_of(found.runs)))
    for name in found.failures:
        print(f"FAILED: {name}")


def known(name: str) -> str:
    """Returns the name of a system; ArgumentTypeError if there is none of that name."""
    first, *words = name.split("-")
    if name in PEERS or first == "ours" and set(words) <= WORDS:
        return name
    words = ", ".join(sorted(WORDS))
    peers = " or ".join(PEERS)
    raise argparse.ArgumentTypeError(f"{name!r} must be {peers}, or ours with words of {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--systems", nargs="+", type=known, default=["ours", "trl-async"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), default=2)
    parser.add_argument("--learner", default="{}", help="more of our table, as JSON")
    parser.add_argument("--servers", type=int, default=1, help="of ours, with GPUs of their own")
    parser.add_argument("--shape", choices=(*SHAPES, *FAMILIES), default="0.6B")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=0.0, help="no later round begins after")
    parser.add_argument("--run-s", type=float, default=240.0, help="limit of one system's run")
    parser.add_argument("--fixed-steps", type=int, default=30, help="with replies of one length")
    parser.add_argument("--steps", type=int, default=50, help="of both lengths")
    parser.add_argument("--sequences", type=int, help="of a step; 256, on a CPU 16")
    parser.add_argument("--group", type=int, help="16, on a CPU 4")
    parser.add_argument("--episodes", type=int, help="under way; 512, on a CPU 16")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.3, help="GPU memory of each engine")
    # Engines that start side by side would measure each other's memory.
    parser.add_argument("--kv-gib", type=int, default=24, help="of it for each KV cache")
    parser.add_argument("--micro-tokens", type=int, default=32768, help="of our micro batches")
    parser.add_argument("--peer-micro", type=int, help="sequences; 32, on a CPU 4")
    parser.add_argument("--peer-path", action="append", default=[], help="FOLDER or PEER=FOLDER")
    parser.add_argument("--folder", type=Path, help="of models, runs and logs; a temporary one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if len(arguments.systems) > 1 and any("defaults" in name for name in arguments.systems):
        parser.error("defaults take a whole GPU: give such a system alone")
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
