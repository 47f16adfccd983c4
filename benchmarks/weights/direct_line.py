"""Pauses for updates of a tiny model's engine, with and without the direct line, in turns.

    PYTHONPATH=tests:deploy python -m benchmarks.weights.direct_line --updates 80

It runs on a CPU, with plain matrices as on a GPU, so that a plan copies every update.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import quantiles

from slipstream.core.types import PolicyVersion
from support.fakes.gloo_sender import layout_of
from support.fakes.plain_matrices import keep_matrices_plain
from support.rigs.engine_rig import PROMPT, SAMPLING, Rig, engine_rig

ENDLESS = dataclasses.replace(SAMPLING, ignore_eos=True)


async def paused_ms(rig: Rig, version: int) -> float:
    """Publishes once; returns the milliseconds from the order to receive to the engine's resume."""
    weights = (rig.old, rig.new)[version % 2]
    layout = layout_of(weights)
    order = rig.sender.order(f"p{version}", version)
    sending = asyncio.create_task(asyncio.to_thread(rig.sender.send, layout, weights))
    await rig.engine.prepare_weights(order, layout, 1)
    began_s = time.perf_counter()
    await rig.engine.receive_weights(order.publish_id)
    await rig.engine.resume(PolicyVersion(0, version))
    found = 1e3 * (time.perf_counter() - began_s)
    await sending
    return found


def listen(rig: Rig, *, use_line: bool) -> None:
    """Hears the direct line from now on, or leaves every answer to vLLM."""
    line, loop = rig.engine._workers._line, asyncio.get_running_loop()
    for ours in line._sockets:
        loop.remove_reader(ours)
        if use_line:
            loop.add_reader(ours, line._read, ours)
    line.is_up = use_line


async def replies(rig: Rig, name: str) -> None:
    """Samples one reply after another, until it is cancelled."""
    number = 0
    while True:
        number += 1
        await rig.generate(f"{name}-{number}", PROMPT, 200, ENDLESS)


async def run(updates: int) -> None:
    """Prints the quartiles of each case."""
    keep_matrices_plain()
    with tempfile.TemporaryDirectory() as folder:
        async with engine_rig(Path(folder), max_episodes=64) as rig:
            await rig.publish(rig.old, 0)
            version = 1
            for running in (0, 16, 64):
                tasks = [
                    asyncio.create_task(replies(rig, f"{running}-{n}")) for n in range(running)
                ]
                found: dict[str, list[float]] = defaultdict(list)
                for turn in range(2 * updates):
                    use_line = turn % 2 == 0
                    listen(rig, use_line=use_line)
                    await asyncio.sleep(0.03)
                    version += 1
                    found["line" if use_line else "vLLM"].append(await paused_ms(rig, version))
                for way, milliseconds in found.items():
                    low, median, high = quantiles(milliseconds, n=4)
                    print(f"{running} replies, {way}: {median:.1f} ms ({low:.1f}-{high:.1f})")
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--updates", type=int, default=80)
    asyncio.run(run(arguments.parse_args().updates))
