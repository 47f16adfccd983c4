"""Measures how long an engine stands still for a version from storage: whole, and its changes.

    python benchmarks/storage_pause.py --folder /mnt/disk

A trainer's rank writes versions of a shape, a server's own code fetches them, and a real engine
loads them, in turns: all of a version, as its first one is loaded, and what it changes. On a CPU
vLLM keeps plain matrices, as it does on a GPU, since no changes can be put into packed ones. Where
others share the machine, the processor's time of an idle engine is what can be compared. Prints one
table and writes benchmarks/results/storage_pause.json. Takes 11 GB of memory for 0.6B.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import Spread, progress, settings_of, table, write_result
from rig import HERE
from shapes import SHAPES, make_shape
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.types import PolicyVersion
from slipstream.protocol.codec import version_to_pb
from slipstream.protocol.weights.deltas import content_name
from slipstream.rollout_server import process
from slipstream.rollout_server.engine_interface import LoadedWeights, Sampling
from slipstream.rollout_server.stored_weights import Fetched
from slipstream.v1 import weights_pb2
from storage import LIMIT_S, Store, Weights

if TYPE_CHECKING:
    from slipstream.rollout_server.vllm.engine import VllmEngine

REPLY_TOKENS = 2000
Row = dict[str, Any]


class StoredEngine:
    """An engine and the storage from which it takes versions."""

    def __init__(self, engine: VllmEngine, store: Store) -> None:
        self.engine, self._store, self._server = engine, store, store.reader()
        self._served = b""

    async def load(self, *, whole: bool = False, changes: bool = True) -> Row:
        """Writes a version, fetches it and loads it: all of it unless `changes`."""
        stored, _, _ = self._store.write(whole=whole)
        base = self._served if changes else b""
        fetched = await asyncio.to_thread(self._server.fetch, stored, threading.Event(), base)
        order, is_busy = self._order(fetched), self.engine.use().open_requests > 0
        begun_s = time.perf_counter()
        await self.engine.prepare_weights(order, fetched.layout, 1)
        prepared_s, processor_s = time.perf_counter(), self._processor_s()
        loaded = await self.engine.receive_weights(order.publish_id)
        await self.engine.resume(PolicyVersion(0, self._store.number))
        still_s = time.perf_counter() - prepared_s
        processor_s = self._processor_s() - processor_s
        self._prove(loaded)
        return {
            "what": "changes" if fetched.delta is not None else "all",
            "is_busy": is_busy,
            "staged": loaded.staged,
            "by_plan": loaded.by_plan,
            "fetch_s": round(fetched.seconds, 3),
            "prepare_s": round(prepared_s - begun_s, 3),
            "load_s": round(loaded.load_s + loaded.receive_s, 3),
            "still_s": round(still_s, 3),
            "processor_s": round(processor_s, 3),
        }

    def _processor_s(self) -> float:
        """Returns the seconds that the engine's processes have computed."""
        return sum(p.cpu_times().user + p.cpu_times().system for p in self.engine._processes)

    def _order(self, fetched: Fetched) -> weights_pb2.PublishOrder:
        number = self._store.number
        where = weights_pb2.Communicator(
            communicator_id=f"s{number}", transport="storage", path=str(fetched.path.resolve())
        )
        order = weights_pb2.PublishOrder(
            publish_id=f"s{number}",
            version=version_to_pb(PolicyVersion(0, number)),
            communicator=where,
            new_communicator=True,
            bucket_deadline_s=LIMIT_S,
            join_deadline_s=LIMIT_S,
        )
        if fetched.delta is not None:
            order.delta.CopyFrom(fetched.delta)
        return order

    def _prove(self, loaded: LoadedWeights) -> None:
        if list(loaded.bucket_digests) != list(self._store.chain[-1].bucket_digests):
            raise SystemExit("the engine has other weights than were written")
        self._served = content_name(loaded.bucket_digests) if loaded.takes_deltas else b""


async def started(arguments: argparse.Namespace, folder: Path) -> VllmEngine:
    """Starts an engine of the shape, with whatever weights."""
    settings = {
        "run": {"name": "r", "dir": str(folder), "steps": 1},
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "algorithm": {"group_size": 4, "groups_per_step": 1, "learning_rate": 1e-6},
        "sampling": {
            "max_reply_tokens": REPLY_TOKENS,
            "max_episode_tokens": REPLY_TOKENS + 64,
        },
        "debug": {"ignore_eos": True},
        "rollout_server": {
            "max_episodes": 8,
            "threads": arguments.threads,
            "enforce_eager": True,
            "kv_cache_gib": 2,
        },
    }
    config = parse_config(settings, source="the benchmark")
    on_cpu = process.is_cpu_build()
    os.environ |= process.engine_environment(config.rollout_server, on_cpu=on_cpu)
    if on_cpu:
        sys.path.insert(0, str(HERE.parent / "tests"))
        from support.fakes.plain_matrices import keep_matrices_plain

        # The engine's processes are forked.
        keep_matrices_plain()
    from slipstream.rollout_server.vllm.engine import VllmEngine

    return await VllmEngine.start(config, seed=1)


async def measured(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """Returns a row for each version that the engine loaded, idle and then with requests."""
    weights = Weights(arguments.shape, arguments.layers)
    store, rows = Store(weights, folder), list[Row]()
    engine = await started(arguments, folder)
    sampling = Sampling(1.0, 1.0, 0, REPLY_TOKENS, 1, REPLY_TOKENS + 64, ignore_eos=True)
    running: list[asyncio.Task[Any]] = []
    try:
        far = StoredEngine(engine, store)
        progress(f"first: {await far.load(whole=True)}")
        for requests in sorted({0, arguments.requests}):
            running = [
                asyncio.create_task(engine.generate(f"r{n}", [5 + n] * 16, sampling, REPLY_TOKENS))
                for n in range(requests)
            ]
            for number in range(4 * arguments.rounds):
                # The setting `weights.stage_on_server`, without another start.
                engine._updates._stage = number % 4 >= 2
                weights.change(arguments.share)
                rows.append(await far.load(changes=bool(number % 2)))
                progress(str(rows[-1]))
                if requests:
                    await asyncio.sleep(arguments.between_s)
        return rows
    finally:
        for reply in running:
            reply.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await engine.aclose()


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--rounds", type=int, default=4, help="versions of each kind")
    parser.add_argument("--requests", type=int, default=4, help="0: idle alone")
    parser.add_argument("--between-s", type=float, default=2.0, help="that requests run between")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make_shape(Path(name) / "model", arguments.shape, layers=arguments.layers)
        found = asyncio.run(measured(arguments, Path(name)))
    lines = table(
        [
            *("engine", "read before the pause", "a version", "stands still, s"),
            *("its processor's time, s", "workers load, s"),
        ],
        [
            [
                "busy" if busy else "idle",
                "yes" if stage else "no",
                what,
                *(Spread.of([row[f"{part}_s"] for row in rows]).text(2) for part in PARTS),
            ]
            for busy in (False, True)
            for stage in (False, True)
            for what in ("all", "changes")
            if (rows := [r for r in found if of_kind(r, what, busy=busy, stage=stage)])
        ],
    )
    print("\n".join(lines))
    record = {"settings": settings_of(arguments), "found": found, "table": lines}
    write_result("storage_pause", record)
    return 0


PARTS = ("still", "processor", "load")


def of_kind(row: Row, what: str, *, busy: bool, stage: bool) -> bool:
    """Returns whether a row belongs to this line of the table."""
    return (row["what"], row["is_busy"], row["staged"]) == (what, busy, stage)


if __name__ == "__main__":
    sys.exit(main())
