"""Measures what the Tinker API adds to the work behind it.

A step is `forward_backward` and `optim_step`, sent together, until both results are there: over
HTTP, of a run with one trainer rank, and beside it in this process `Passes`, which the trainer
has for it, and `TrainingStep`, which is the step of a run of our own. All three train the same
sequences. The programs of the run note moments, and a step over HTTP is told in parts: what is
carried from one program to another, what is written to the disk, and what computes.

A sample is a request and its result, of a server that replies at once: all of it is added, but
for what client and server take, so that processor time says more than what passes. It is told for
a step, too, of each program.

    export PYTHONPATH=tests:deploy
    python -m benchmarks.controller.client_loop                        # on a CPU
    python -m benchmarks.controller.client_loop --idle --load-of 0.6B  # what is not its passes
    python -m benchmarks.controller.client_loop --shape 0.6B           # on a GPU

Prints three tables and writes benchmarks/results/client-loop-SHAPE.json. Each part is printed as
soon as it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from slipstream.client.launch.children import rank_environments
from slipstream.core.configuration.config_file import dump_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.protocol.access.run_token import make_run_token, run_credentials
from slipstream.v1 import trainer_pb2
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.fakes.named_channel import RUN_ID
from support.rigs.loop_client import ADAM, LoopClient
from support.rigs.loop_runs import loop_config

from benchmarks.common import measure
from benchmarks.common.shapes import SHAPES, make_apart
from benchmarks.controller import timeline
from benchmarks.controller.load import processor_s
from benchmarks.learner.loops import LOADS, Load, lognormal_batch, shape_config, synchronize

HTTP = "over HTTP"
PASSES = "passes alone"
OWN = "a run's own step"
# The place of the pass among the parts.
PASS = next(n for n, (_, _, kind) in enumerate(timeline.PARTS) if kind == "pass")
# Samples at once.
AT_ONCE = (1, 64)
# Adam moves the weights as little as it can: all steps have the same work.
RATE = 1e-12


@dataclass(frozen=True)
class Sampled:
    """Seconds of each turn, for one sample, and processor time of a sample in both processes."""

    wall_s: list[float]
    controller_s: float
    front_s: float


Datum = tuple[list[int], list[int], dict[str, list[float]]]


def data_of(batch: Batch) -> list[Datum]:
    """Returns the sequences of a batch as a client gives them."""
    data: list[Datum] = []
    for trajectory in batch.trajectories:
        tokens = trajectory.token_ids.tolist()
        inputs = {
            "logprobs": trajectory.behavior_logprobs.tolist(),
            "advantages": [trajectory.reward - 0.5] * (len(tokens) - 1),
        }
        data.append((tokens[:-1], tokens[1:], inputs))
    return data


@contextlib.asynccontextmanager
async def program(*arguments: str, **environ: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program of this Python, which is ended after use."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        env=os.environ | environ,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def steps_over_http(
    config: Config, data: list[Datum], arguments: argparse.Namespace
) -> tuple[list[float], list[list[float]], dict[str, float]]:
    """Returns the seconds of each step of a client, whose run this starts, and of their parts.

    The third are the seconds of processor time of a step, by program.
    """
    config.run_dir.mkdir(parents=True)
    make_run_token(config)
    (noted := config.run_dir.parent / "moments").mkdir()
    path = config.run_dir.parent / "client-loop.toml"
    path.write_text(dump_config(config))
    port = free_port("127.0.0.1")
    settings = ("--config", str(path))
    (environ,) = rank_environments(config, range(1))

    def role(name: str, *more: str, **environ: str) -> contextlib.AbstractAsyncContextManager:
        file = str(noted / name)
        return program("benchmarks.controller.timeline", file, name, *settings, *more, **environ)

    trainer = role("trainer", **environ)
    if arguments.idle:
        file = str(noted / "trainer")
        trainer = program("benchmarks.controller.idle_trainer", file, *settings)
    front = role("front", "--port", str(port))
    async with role("controller") as first, trainer as second, front as third:
        programs = {"controller": first, "trainer": second, "HTTP process": third}

        def spent() -> dict[str, float]:
            return {name: processor_s(process.pid) for name, process in programs.items()}

        client = LoopClient(port, base_model=str(config.model.path))
        await client.ready()
        await client.begin()
        measure.progress("the run has begun")
        took_s = []
        parts = []
        for turn in range(arguments.repeats + arguments.uncounted):
            if turn == arguments.uncounted:
                before = spent()
            request = client.passed(data, "ppo")
            begun_s = time.monotonic()
            passed = await client.send(request)
            stepped = await client.order("optim_step", adam_params=ADAM | {"learning_rate": RATE})
            await client.result(passed)
            assert "error" not in (report := await client.result(stepped)), report
            ended_s = time.monotonic()
            took_s.append(ended_s - begun_s)
            parts.append(timeline.parts(timeline.read(noted), begun_s, ended_s))
            measure.progress(
                f"step {turn}: {1000 * took_s[-1]:.0f} ms, "
                + " ".join(f"{1000 * part:.1f}" for part in parts[-1])
            )
            measure.note("client-loop", {"took_s": took_s[-1], "parts_s": parts[-1]})
        cpu_seconds = {
            name: (at_s - before[name]) / arguments.repeats for name, at_s in spent().items()
        }
        await client.http.aclose()
    return took_s[arguments.uncounted :], parts[arguments.uncounted :], cpu_seconds


def steps_here(
    config: Config, batch: Batch, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Returns the seconds of steps in this process, those of both loops in turns."""
    from slipstream.extensions.tinker.requested_passes import forward_backward
    from slipstream.extensions.tinker.wire_pb2 import ForwardBackwardRequest
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.passes import Passes
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    policy = open_policy(config, Launch(0, 1, 0), load_weights=False)
    training = TrainingStep(policy, config)
    passes = Passes(policy, lambda *_: None, lambda: None)
    client = LoopClient(0)
    numbers = trainer_pb2.AdamNumbers(**ADAM | {"learning_rate": RATE})

    def by_passes() -> None:
        request = ForwardBackwardRequest.FromString(client.passed(data_of(batch), "ppo"))
        requested_pass = forward_backward(request).compute
        started[0] = time.perf_counter()
        passes.compute(requested_pass)
        passes.run(Batch(0, "b", (), trainer_pb2.GivenStep(adam=numbers), (requested_pass,)))

    loops: dict[str, Callable[[], object]] = {OWN: lambda: training.run(batch), PASSES: by_passes}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(arguments.repeats + arguments.uncounted):
        for name, step in loops.items():
            synchronize(policy.ranks.device)
            started = [time.perf_counter()]
            step()
            synchronize(policy.ranks.device)
            if turn >= arguments.uncounted:
                seconds[name].append(time.perf_counter() - started[0])
    policy.ranks.close()
    return seconds


async def samples(folder: Path, arguments: argparse.Namespace) -> dict[int, Sampled]:
    """Returns what a sample takes, by the number of them at once."""
    config = loop_config(folder)
    config.run_dir.mkdir(parents=True)
    make_run_token(config)
    path = folder / "samples.toml"
    path.write_text(dump_config(config))
    address = config.controller.address
    peers = FakeTrainer(address), FakeServer(address, max_episodes=max(AT_ONCE), delay_s=0.0)
    credentials = run_credentials(config)
    for peer in peers:
        peer.credentials = credentials
    port = free_port("127.0.0.1")
    costs = {}
    front = ("slipstream.extensions.tinker.front", "--config", str(path), "--port", str(port))
    controller = program("slipstream.learner.controller", "--config", str(path))
    async with controller as first, program(*front) as second:
        tasks = [asyncio.ensure_future(peer.run()) for peer in peers]
        client = LoopClient(port)
        await client.ready()
        await client.begin()
        session = await client.publish()

        async def one() -> None:
            await client.result(await client.ask(session, list(range(32))))

        async def turns(number: int, times: int) -> list[float]:
            took_s = []
            for _ in range(times):
                started_s = time.perf_counter()
                await asyncio.gather(*(one() for _ in range(number)))
                took_s.append((time.perf_counter() - started_s) / number)
            return took_s

        for number in AT_ONCE:
            await turns(number, arguments.uncounted)
            before = [processor_s(process.pid) for process in (first, second)]
            took_s = await turns(number, arguments.samples)
            spent = [processor_s(process.pid) for process in (first, second)]
            num_replies = number * arguments.samples
            cpu_seconds = [
                (end_s - start_s) / num_replies
                for start_s, end_s in zip(before, spent, strict=True)
            ]
            costs[number] = Sampled(took_s, *cpu_seconds)
        await client.http.aclose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return costs


def table_of(parts: list[list[float]]) -> list[str]:
    """Returns the table of the parts of a step, which are one after another."""
    rows = [
        [what, kind, measure.Spread.of(took_s).text(1, 1000)]
        for (_, what, kind), took_s in zip(timeline.PARTS, zip(*parts, strict=True), strict=True)
    ]
    rest_s = [sum(took_s) - took_s[PASS] for took_s in parts]
    rows.append(["all but the pass", "", measure.Spread.of(rest_s).text(1, 1000)])
    return measure.table(["part of a step over HTTP", "what it is", "ms (min-max)"], rows)


def table_of_samples(replies: dict[int, Sampled]) -> list[str]:
    """Returns the table of what a sample takes."""
    return measure.table(
        ["samples at once", "ms each (min-max)", "processor ms: controller, HTTP process"],
        [
            [
                number,
                measure.Spread.of(cost.wall_s).text(2, 1000),
                f"{1000 * cost.controller_s:.2f}, {1000 * cost.front_s:.2f}",
            ]
            for number, cost in replies.items()
        ],
    )


def run_config(load: Load, folder: Path, arguments: argparse.Namespace) -> Config:
    """Returns the settings of the run on a whole model."""
    make_apart(
        folder / "model",
        arguments.shape,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        layers=load.layers,
    )
    config = shape_config(arguments.shape, load, folder / "model", threads=arguments.threads)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    controller = {"client_loop": True, "address": address}
    run = {"dir": folder / "runs", "name": "own", "id": RUN_ID}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update=run),
            "controller": config.controller.model_copy(update=controller),
            "learner": config.learner.model_copy(update={"shared_prefix_tokens": 0}),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(LOADS), default="tiny")
    parser.add_argument("--load-of", choices=tuple(LOADS), help="train as many tokens as it does")
    parser.add_argument("--idle", action="store_true", help="measure the parts without a model")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each loop")
    parser.add_argument("--uncounted", type=int, default=3, help="steps and samples before")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    # Every token is trained, as in a pass.
    load = dataclasses.replace(
        LOADS[arguments.load_of or arguments.shape],
        layers=LOADS[arguments.shape].layers,
        prompt_tokens=1,
    )
    batch = lognormal_batch(load, SHAPES[arguments.shape].vocab, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = run_config(load, folder, arguments)
        over_http, parts, spent = asyncio.run(steps_over_http(config, data_of(batch), arguments))
        seconds_by_loop = {HTTP: over_http}
        processor_ms = ", ".join(f"{name} {1000 * value:.1f}" for name, value in spent.items())
        parts_table = [*table_of(parts), "", f"Processor ms of a step: {processor_ms}", ""]
        print("\n".join(parts_table), flush=True)
        measure.progress("samples")
        replies = asyncio.run(samples(folder / "samples", arguments))
        print("\n".join(samples_table := table_of_samples(replies)), flush=True)
        record = {"settings": measure.settings_of(arguments), "parts": parts, "processor_s": spent}
        record["samples"] = {number: asdict(reply) for number, reply in replies.items()}
        if arguments.idle:
            record["table"] = [*parts_table, *samples_table]
            measure.write_result("client-loop-idle", record, arguments.out)
            return
        measure.progress("steps in this process")
        seconds_by_loop |= steps_here(config, batch, arguments)
    spreads = {name: measure.Spread.of(times) for name, times in seconds_by_loop.items()}
    own_median = spreads[OWN].median
    rows = [
        [
            name,
            spread.text(2, 1000),
            f"{1000 * (spread.median - own_median):.2f}",
            f"{spread.median / own_median:.3f}",
        ]
        for name, spread in spreads.items()
    ]
    tokens = sum(len(trajectory.token_ids) for trajectory in batch.trajectories)
    table = measure.table([f"step of {tokens:,} tokens", "ms (min-max)", "more", "of own"], rows)
    print("\n".join(table))
    record |= {"table": [*table, *parts_table, *samples_table], "steps": seconds_by_loop}
    measure.write_result(f"client-loop-{arguments.shape}", record, arguments.out)


if __name__ == "__main__":
    main()
