r"""Measures new weights from the learner to one or several rollout servers, end to end.

Ours are the real trainer ranks, controller and rollout servers. The publish of a step is timed,
idle and with requests running. The peer is vLLM's own transfer over NCCL between the same GPUs. The
limit is one broadcast of as many bytes in one buffer, in the same run. The three take turns.

    python -m benchmarks.weights.broadcast --device cuda --shape 8B --servers 1
    python -m benchmarks.weights.broadcast --device cuda --shape 0.6B --servers 3
    python -m benchmarks.weights.broadcast --device cuda --shape 8B --tp 2 --server-tp 2
    python -m benchmarks.weights.broadcast            # tiny, over gloo, without the peer

Prints one table; benchmarks/results/weight_broadcast-SHAPE-SERVERS.json is written when the idle
engines are done, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import uvloop
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config

from benchmarks.common.measure import note, part, progress, settings_of, write_result
from benchmarks.common.rig import Placement, Rig
from benchmarks.common.shapes import SHAPES, make_apart
from benchmarks.weights.broadcast_programs import NativeTransfer, RawBroadcast
from benchmarks.weights.broadcast_tables import Found, Row, stages, summary

TARGETS = {"wire of raw": 0.90, "end to end of raw": 0.60}
# Targets for the engine's pause: at 8B in wire times, at 0.6B in milliseconds on an idle engine.
PAUSE_TARGETS = {"8B": "at most 3 wire times", "0.6B": "at most 40 ms idle"}
START_LIMIT_S = 400.0
CALM_LIMIT_S = 60.0
REPLY_TOKENS = 600


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    """Returns the settings of a run whose batches never become complete: it only publishes."""
    on_gpu = arguments.device == "cuda"
    rollout = {
        "max_episodes": arguments.requests,
        "tensor_parallel_size": arguments.server_tp,
        "threads": 4 if on_gpu else 1,
        "enforce_eager": arguments.enforce_eager or not on_gpu,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "start_timeout_s": START_LIMIT_S,
        "recompute_context": not arguments.keep_context,
    }
    weights = {
        "transport": arguments.transport,
        "verify_every": arguments.verify_every,
        "bucket_deadline_s": 30.0,
        "join_deadline_s": 120.0,
    }
    if arguments.decode_graphs:
        sizes = [arguments.requests // part for part in (8, 4, 2, 1)]
        rollout["engine"] = {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
        }
    if arguments.bucket_mib:
        weights["bucket_mib"] = arguments.bucket_mib
    settings = {
        "run": {"name": "r", "dir": str(folder), "steps": 1000},
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if on_gpu else "float32"},
        "environments": [
            {
                "name": "gated",
                "reference": "benchmarks.common.workloads:Gated",
                "args": {"gate": str(folder / "gate")},
                "timeout_s": 3600.0,
            }
        ],
        "algorithm": {
            "group_size": 4,
            "groups_per_step": 2000,
            "max_staleness": 0,
            "learning_rate": 1e-6,
        },
        "sampling": {
            "max_reply_tokens": REPLY_TOKENS if on_gpu else 100,
            "max_episode_tokens": REPLY_TOKENS + 64,
        },
        "debug": {"ignore_eos": True},
        "controller": {
            "address": f"127.0.0.1:{free_port('127.0.0.1')}",
            "stall_timeout_s": 3600.0,
        },
        "learner": {
            "world_size": arguments.tp,
            "parallel": {"tp": arguments.tp},
            "threads": 4 if on_gpu else 1,
            "export_final": False,
            **json.loads(arguments.learner),
        },
        "rollout_server": rollout,
        "weights": weights,
        "queue": {"max_bytes": 1 << 32},
    }
    return parse_config(settings, source="the benchmark")


class Measurement:
    """Measures ours, the peer and the limit on the same devices."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, found: Found) -> None:
        self._arguments = arguments
        self._folder = folder
        self._found = found
        first = range(arguments.tp, arguments.tp + arguments.servers * arguments.server_tp)
        servers = [
            tuple(first[at : at + arguments.server_tp])
            for at in range(0, len(first), arguments.server_tp)
        ]
        self._placement = Placement(tuple(range(arguments.tp)), tuple(servers), arguments.device)
        if arguments.device == "cpu":
            self._placement = Placement((), ((),) * arguments.servers, "cpu")
        self._name = arguments.name
        self._has_peer = arguments.device == "cuda" and not arguments.without_peer

    async def run(self) -> None:
        """Starts all processes, measures, and ends all of them."""
        config = config_of(self._arguments, self._folder)
        async with Rig(config, self._placement) as rig:
            logs = config.run_dir / "logs"
            logs.mkdir(exist_ok=True)
            raw = RawBroadcast(self._placement, logs)
            native = NativeTransfer(self._arguments, self._placement, self._folder / "model", logs)
            try:
                if not self._arguments.without_limit:
                    await raw.spawn()
                if self._has_peer:
                    await native.spawn()
                rig.controller.bound(0)
                await rig.start_trainers()
                for index in range(self._arguments.servers):
                    await rig.start_server(index)
                starts = self._found.starts
                starts["ours"] = await rig.until_serving(START_LIMIT_S)
                times = rig.controller.publishes[-1]
                self._found.num_bytes = int(times.trainer["bytes_sent"])
                first = times.row()
                note(self._name, {"what": "first publish", **first})
                progress(f"ours serve after {starts['ours']:.0f} s; {first}")
                if not self._arguments.without_limit:
                    with part("start of the limit", self._found.failures):
                        await raw.join()
                if self._has_peer:
                    started = time.monotonic()
                    with part("start of the peer", self._found.failures):
                        await native.join()
                    starts["peer"] = time.monotonic() - started
                await self._idle(rig, raw, native)
                write(self._arguments, self._found)
                with part("ours with requests running", self._found.failures):
                    await self._busy(rig)
                if native.is_ready:
                    with part("the peer with requests running", self._found.failures):
                        await self._until_calm(rig)
                        await self._busy_peer(native)
            finally:
                await raw.close()
                await native.close()

    async def _idle(self, rig: Rig, raw: RawBroadcast, native: NativeTransfer) -> None:
        found = self._found
        # The first round warms up.
        for repeat in range(self._arguments.repeats + 1):
            with part(f"repeat {repeat}, idle", found.failures):
                row = (await rig.publish()).row()
                self._keep("ours idle", row, found.ours["idle"], repeat)
            if native.is_ready:
                with part(f"repeat {repeat}, peer", found.failures):
                    row = await native.update()
                    self._keep("peer idle", row, found.native["idle"], repeat)
            if raw.is_ready:
                with part(f"repeat {repeat}, limit", found.failures):
                    wire_s, host_s = await raw.broadcast(found.num_bytes)
                    self._keep("raw", {"wire_s": wire_s, "host_s": host_s}, None, repeat)
                    if repeat:
                        found.raw_wire.append(wire_s)
                        found.raw.append(host_s)

    async def _busy(self, rig: Rig) -> None:
        gate = self._folder / "gate"
        gate.touch()
        try:
            before = rig.controller.generated_tokens()
            wanted = 20 * self._arguments.requests
            await rig.until(
                lambda: rig.controller.generated_tokens() - before > wanted, "requests", 120.0
            )
            for repeat in range(self._arguments.repeats + 1):
                row = (await rig.publish()).row()
                row["open_episodes"] = [s.report.open_episodes for s in rig.controller.sessions]
                self._keep("ours busy", row, self._found.ours["busy"], repeat)
                await asyncio.sleep(self._arguments.between_s)
        finally:
            gate.unlink()

    async def _until_calm(self, rig: Rig) -> None:
        """Waits until our servers' requests have ended by themselves."""
        before = -1
        deadline = time.monotonic() + CALM_LIMIT_S
        while (now := rig.controller.generated_tokens()) != before:
            if time.monotonic() > deadline:
                raise RuntimeError(f"requests still run after {CALM_LIMIT_S:g} s")
            before = now
            await asyncio.sleep(4 * rig.config.controller.heartbeat_s)

    async def _busy_peer(self, native: NativeTransfer) -> None:
        await native.load(self._arguments.requests)
        await asyncio.sleep(3.0)
        for repeat in range(self._arguments.repeats + 1):
            row = await native.update()
            self._keep("peer busy", row, self._found.native["busy"], repeat)
            await asyncio.sleep(0.3)
        await native.unload()

    def _keep(self, what: str, row: Row, rows: list[Row] | None, repeat: int) -> None:
        note(self._name, {"what": what, "repeat": repeat, **row})
        shown = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
        progress(f"{what} {repeat}: {shown}")
        if rows is not None and repeat:
            rows.append(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", default="", help="default: nccl on GPUs, else gloo")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the shape")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="of the learner")
    parser.add_argument("--server-tp", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256, help="that run on a busy engine")
    parser.add_argument("--bucket-mib", type=int, default=0, help="0: the default of the settings")
    parser.add_argument("--verify-every", type=int, default=1000, help="publishes to one probe")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.33)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--keep-context", action="store_true", help="compute no context anew")
    parser.add_argument(
        "--between-s", type=float, default=0.3, help="between two publishes to a busy engine"
    )
    parser.add_argument(
        "--decode-graphs",
        action="store_true",
        help="CUDA graphs of decoding steps alone, without torch.compile: starts a minute sooner",
    )
    parser.add_argument("--learner", default="{}", help="more of the table, as JSON")
    parser.add_argument("--without-limit", action="store_true", help="no broadcast of one buffer")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--model-folder", type=Path, help="is made where it does not exist yet")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.transport = arguments.transport or ("nccl" if arguments.device == "cuda" else "gloo")
    is_split = max(arguments.tp, arguments.server_tp) > 1
    layout = f"-tp{arguments.tp}-{arguments.server_tp}" if is_split else ""
    arguments.name = f"weight_broadcast-{arguments.shape}-{arguments.servers}{layout}"
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model_folder or folder / "made"
        if not (model / "config.json").exists():
            dtype = "bfloat16" if arguments.device == "cuda" else "float32"
            make_apart(model, arguments.shape, dtype=dtype, layers=arguments.layers)
            progress(f"a model of shape {arguments.shape} lies in {model}")
        (folder / "model").symlink_to(model.resolve())
        with part("the whole", found.failures):
            uvloop.run(Measurement(arguments, folder, found).run())
        if found.failures:
            for log in sorted((folder / "r" / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    print("\n".join(write(arguments, found)), flush=True)
    if found.failures:
        raise SystemExit(f"failed: {', '.join(found.failures)}")


def write(arguments: argparse.Namespace, found: Found) -> list[str]:
    """Writes the result as far as it is known; returns its tables."""
    lines, ratios = summary(found)
    targets = {**TARGETS, "pause": PAUSE_TARGETS.get(arguments.shape, "")}
    record = {"settings": settings_of(arguments), "targets": targets, "ratios": ratios}
    more = {"table": lines, "stages": stages(found), "measured": vars(found)}
    write_result(arguments.name, {**record, **more}, arguments.out)
    return [*lines, "", *more["stages"], "", str(ratios)]


if __name__ == "__main__":
    main()
