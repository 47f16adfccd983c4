"""Megatron-Bridge's own training loop beside ours: a process of its own on the same device."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from slipstream.client.launch.preflight import free_port
from slipstream.learner.trainer.batches.micro_batch import MicroBatch

START_LIMIT_S, TURN_LIMIT_S, END_LIMIT_S = 180.0, 300.0, 30.0
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
_SAVED = ("token_ids", "targets", "loss_mask", "position_ids", "cu_seqlens")


@dataclass(frozen=True)
class Spent:
    """The cost of one turn."""

    wall_s: float
    cpu_s: float
    # Most memory of the device in use; 0 on a CPU.
    peak_gib: float


class EntryPoint:
    """Runs `benchmarks.learner.pretrain`, which trains when it is told and waits in between."""

    def __init__(
        self,
        model: Path,
        steps: Sequence[Sequence[MicroBatch]],
        folder: Path,
        *,
        command: Sequence[str],
    ) -> None:
        """Starts the program; ValueError if the steps have different numbers of micro batches."""
        sizes = {len(micro_batches) for micro_batches in steps}
        if len(sizes) != 1:
            raise ValueError(f"each step must have the same number of micro batches, got {sizes}")
        saved = folder / "micro_batches.pt"
        save_micro_batches([one for micro_batches in steps for one in micro_batches], saved)
        self._log = folder / "pretrain.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *command,
                    str(model),
                    str(saved),
                    f"--batch-size={sizes.pop()}",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"MASTER_PORT": str(free_port("127.0.0.1"))} | _ALONE,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> None:
        """Waits until the loop is about to begin its first step; RuntimeError with its log."""
        self._answer(START_LIMIT_S)

    def turn(self, steps: int) -> Spent:
        """Runs `steps` steps, one after another; returns what they cost."""
        assert self._process.stdin is not None
        # `_answer` reports a program that has ended, with the end of its log.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        return self._answer(TURN_LIMIT_S)

    def close(self) -> None:
        """Ends the program with all processes below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_LIMIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, limit_s: float) -> Spent:
        what = "ended"
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            line, what = "", f"gave no answer within {limit_s:g} s"
        if not line:
            said = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the training loop {what}: {said}")
        return Spent(**json.loads(line))


def save_micro_batches(micro_batches: Sequence[MicroBatch], path: Path) -> None:
    """Saves the tensors of the micro batches that a plain cross-entropy needs."""
    torch.save([{name: getattr(one, name).cpu() for name in _SAVED} for one in micro_batches], path)
