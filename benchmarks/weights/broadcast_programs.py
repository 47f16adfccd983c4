"""Starts the programs of `broadcast_peers.py` on the devices of a placement, and commands them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from slipstream.core.machine.address import free_port

from benchmarks.common.measure import program, visible
from benchmarks.common.rig import Placement

START_LIMIT_S = 400.0
CALL_LIMIT_S = 120.0


class Program:
    """One process that reads and writes lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        arguments: Sequence[str],
        places: Sequence[int],
        log: Path,
        *,
        on_gpu: bool,
    ) -> Program:
        """Starts a program in a session of its own; its stderr goes to `log`."""
        environ = dict(os.environ)
        if on_gpu:
            environ["CUDA_VISIBLE_DEVICES"] = visible(places)
        file = log.open("wb")
        process = await asyncio.create_subprocess_exec(
            *program("weights.broadcast_peers"),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=file,
            env=environ,
            start_new_session=True,
            # One line holds the names of all tensors.
            limit=64 << 20,
        )
        return cls(process, file)

    def put(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def get(self, limit_s: float = CALL_LIMIT_S) -> dict[str, Any]:
        """Returns the next line of the program; RuntimeError with the cause when it failed."""
        assert self._process.stdout is not None
        async with asyncio.timeout(limit_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a program has died; see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}; see {self._log.name}")
        return answer

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._log.close()


class RawBroadcast:
    """The `raw` peer: a rank on the learner's first device, and one on every server's devices."""

    def __init__(self, placement: Placement, logs: Path) -> None:
        self._placement = placement
        self._logs = logs
        self._ranks: list[Program] = []
        self.is_ready = False

    async def spawn(self) -> None:
        placement = self._placement
        on_gpu = self._placement.device == "cuda"
        places: list[tuple[int, ...]] = [placement.learner[:1]]
        places += [(gpu,) for server in placement.servers for gpu in server]
        if not on_gpu:
            places = [()] * (1 + len(placement.servers))
        for rank, place in enumerate(places):
            arguments = ["raw", "--rank", str(rank), "--device", placement.device]
            log = self._logs / f"raw-{rank}.log"
            self._ranks.append(await Program.start(arguments, place, log, on_gpu=on_gpu))

    async def join(self) -> None:
        answers = [await rank.get(START_LIMIT_S) for rank in self._ranks]
        meeting = answers[0]["meeting"] or f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
        await self._all(do="join", world_size=len(self._ranks), meeting=meeting)
        self.is_ready = True

    async def broadcast(self, num_bytes: int) -> tuple[float, float]:
        """Broadcasts one buffer; returns its seconds on the wire, and until the last host knows.

        The wire time is that of the rank that came last, as in a publish: the others wait for it.
        """
        answers = await self._all(do="broadcast", num_bytes=num_bytes)
        wire_s = min(float(answer["wire_s"]) for answer in answers)
        return wire_s, max(float(answer["host_s"]) for answer in answers)

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _all(self, **message: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
        for rank in self._ranks:
            rank.put(**message)
        return await asyncio.gather(*(rank.get() for rank in self._ranks))


class NativeTransfer:
    """The vLLM peer: its own engines beside ours, its own sender on the learner's first device."""

    def __init__(
        self, arguments: argparse.Namespace, placement: Placement, model: Path, logs: Path
    ) -> None:
        self._arguments = arguments
        self._placement = placement
        self._model = model
        self._logs = logs
        self._trainer: Program | None = None
        self._servers: list[Program] = []
        self.is_ready = False

    async def spawn(self) -> None:
        """Starts the processes, which begin their imports; the sender also loads its weights."""
        arguments = self._arguments
        command = ["server", "--model", str(self._model), "--max-num-seqs", str(arguments.requests)]
        command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
        command += ["--tensor-parallel-size", str(arguments.server_tp)]
        command += ["--enforce-eager"] if arguments.enforce_eager else []
        for index, gpus in enumerate(self._placement.servers):
            log = self._logs / f"native-server-{index}.log"
            self._servers.append(await Program.start(command, gpus, log, on_gpu=True))
        self._trainer = await Program.start(
            ["trainer", "--model", str(self._model)],
            self._placement.learner[:1],
            self._logs / "native-trainer.log",
            on_gpu=True,
        )

    async def join(self) -> None:
        """Starts the engines, which measure the memory of their GPUs, and joins the sender."""
        assert self._trainer is not None
        await asyncio.gather(*(server.get(START_LIMIT_S) for server in self._servers))
        for server in self._servers:
            server.put(do="go")
        programs = [self._trainer, *self._servers]
        await asyncio.gather(*(program.get(START_LIMIT_S) for program in programs))
        world_size = 1 + len(self._servers) * self._arguments.server_tp
        self._trainer.put(do="join", world_size=world_size, port=free_port("127.0.0.1"))
        await self._serve_trainer()
        self.is_ready = True

    async def update(self) -> dict[str, Any]:
        """Makes one update with all engines paused; returns the seconds of it and of its parts."""
        assert self._trainer is not None
        marks = [time.perf_counter()]
        await self._all(do="pause")
        marks.append(time.perf_counter())
        self._trainer.put(do="send")
        calls = await self._serve_trainer()
        marks.append(time.perf_counter())
        await self._all(do="resume")
        marks.append(time.perf_counter())
        whole_s = marks[-1] - marks[0]
        return {
            "whole_s": whole_s,
            "paused_s": whole_s,
            "pause_s": marks[1] - marks[0],
            "transfer_s": marks[2] - marks[1],
            "resume_s": marks[3] - marks[2],
            **{f"{name}_s": seconds for name, seconds in calls.items()},
        }

    async def load(self, requests: int) -> None:
        await self._all(do="load", requests=requests)

    async def unload(self) -> None:
        await self._all(do="unload")

    async def close(self) -> None:
        programs = [*self._servers, *([self._trainer] if self._trainer else [])]
        await asyncio.gather(*(program.close() for program in programs))

    async def _serve_trainer(self) -> dict[str, float]:
        """Carries out the sender's calls on the engines until it is done; returns their seconds."""
        assert self._trainer is not None
        seconds: dict[str, float] = {}
        while "call" in (message := await self._trainer.get()):
            started = time.perf_counter()
            name = message["call"]
            info = message["info"]
            for index, server in enumerate(self._servers):
                if name == "init_weight_transfer_engine":
                    info = {**info, "rank_offset": 1 + index * self._arguments.server_tp}
                server.put(do="call", name=name, info=info)
            await asyncio.gather(*(server.get() for server in self._servers))
            seconds[name] = time.perf_counter() - started
            self._trainer.put(error="")
        return seconds

    async def _all(self, **message: Any) -> None:  # noqa: ANN401 - JSON
        for server in self._servers:
            server.put(**message)
        await asyncio.gather(*(server.get() for server in self._servers))
