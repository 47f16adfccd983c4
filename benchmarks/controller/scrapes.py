"""Measures what a scrape of /metrics each second costs the controller in processor time.

PYTHONPATH=tests python -m benchmarks.controller.scrapes --steps 200
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from slipstream.core.configuration.config_file import dump_config
from slipstream.core.run_folder import TARGETS
from support.fakes.fake_server import FakeServer
from support.fakes.fake_trainer import FakeTrainer
from support.rigs.controller_runs import make_config
from support.rigs.waiting import until

STEP_S = 0.3


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def scrape(target: str) -> int:
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    accept = "application/openmetrics-text;version=1.0.0"
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    return len(answer)


async def measure(folder: Path, *, steps: int, servers: int, scrapes: bool) -> str:
    changes = {"tracking__prometheus": "127.0.0.1:0"} if scrapes else {}
    config = make_config(folder, run__steps=steps, controller__heartbeat_s=0.5, **changes)
    config.run_dir.mkdir()
    path = config.run_dir / "config.toml"
    path.write_text(dump_config(config))
    controller = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "slipstream.learner.controller", "--config", str(path)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    address = config.controller.address
    trainer = FakeTrainer(address, step_s=STEP_S)
    peers = [FakeServer(address, f"server-{n}").run() for n in range(servers)]
    tasks = [asyncio.ensure_future(peer) for peer in (*peers, trainer.run())]
    await until(lambda: trainer.version.step >= 2)
    target = ""
    if scrapes:
        (entry,) = json.loads((folder / TARGETS / "r@controller.json").read_text())
        target = entry["targets"][0]
    began_s, before_s = time.monotonic(), processor_s(controller.pid)
    num_scrapes = num_bytes = 0
    # The run ends, and its endpoint with it, some steps later.
    while trainer.version.step < steps - 20:
        await asyncio.sleep(1)
        if target:
            num_bytes = await scrape(target)
            num_scrapes += 1
        used_s, passed_s = processor_s(controller.pid) - before_s, time.monotonic() - began_s
    await tasks[-1]
    await controller.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return (
        f"{num_scrapes} scrapes of {num_bytes} bytes: {used_s:.2f} s in {passed_s:.0f} s, "
        f"{used_s / passed_s:.2%} of a core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    for _ in range(asked.turns):
        for scrapes in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                measured = measure(
                    Path(folder), steps=asked.steps, servers=asked.servers, scrapes=scrapes
                )
                print(asyncio.run(measured), flush=True)


if __name__ == "__main__":
    main()
