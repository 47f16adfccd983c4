"""Where the time of an engine's steps goes: wall times of its parts, and the GPU's kernels.

vLLM's engine has a process of its own, which is forked: what `watch` changes here is changed there
too. Once `begin` was called, some steps are timed as they are, some with a wait for the GPU at both
ends of each part, and some by torch's profiler.
"""

from __future__ import annotations

import functools
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_BEGIN, _FOUND = "begin", "steps.json"
_STEPS = {"plain": 200, "synced": 100, "profiled": 60}
_LOOKS_EVERY = 20
_ROWS = 40
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_OLD_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
# Parts of a step, by where they are; a part may hold others.
PARTS = (
    "slipstream.rollout_server.vllm.chunking_scheduler:_Chunking.schedule",
    "slipstream.rollout_server.vllm.chunking_scheduler:_Chunking.update_from_output",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.sample_tokens",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    f"{_RUNNER}.prepare_inputs",
    f"{_RUNNER}.prepare_attn",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.run_pw_graph",
    f"{_RUNNER}.sample",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._get_logprobs_tensors",
    f"{_RUNNER}.postprocess_sampled",
    "slipstream.rollout_server.vllm.drafting_worker:SharedText.propose",
    "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
    f"{_OLD_RUNNER}._update_states",
    f"{_OLD_RUNNER}._prepare_inputs",
    f"{_OLD_RUNNER}._model_forward",
    f"{_OLD_RUNNER}._sample",
    f"{_OLD_RUNNER}._bookkeeping_sync",
    f"{_OLD_RUNNER}.propose_draft_token_ids",
)


class _Steps:
    """The steps of one engine: counts them, and times their parts while that was asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mode, self._left = folder, "", _LOOKS_EVERY
        self._waiting = list(_STEPS)
        self._times: dict[str, list[float]] = defaultdict(list)
        self._profiler: Any = None
        self._began_s = 0.0
        self._found: dict[str, Any] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, whose times are kept under `name`."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any function
            if self._mode not in ("plain", "synced"):
                return call(*args, **kwargs)
            self._sync()
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._sync()
                self._times[name].append(time.perf_counter() - began_s)

        return wrapped

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call`, a whole step, behind which steps are counted."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            found = call(*args, **kwargs)
            self._left -= 1
            if not self._left:
                self._turn()
            return found

        return wrapped

    def _sync(self) -> None:
        if self._mode == "synced" and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _turn(self) -> None:
        if self._mode:
            self._close()
        elif not (self._folder / _BEGIN).exists():
            self._left = _LOOKS_EVERY
            return
        if not self._waiting:
            (self._folder / (_FOUND + ".new")).write_text(json.dumps(self._found))
            (self._folder / (_FOUND + ".new")).rename(self._folder / _FOUND)
            self._mode, self._left = "", 1 << 60
            return
        self._mode = self._waiting.pop(0)
        self._left = _STEPS[self._mode]
        self._times.clear()
        if self._mode == "profiled":
            kinds = torch.profiler.ProfilerActivity
            on_gpu = [kinds.CUDA] if torch.cuda.is_available() else []
            self._profiler = torch.profiler.profile(activities=[kinds.CPU, *on_gpu])
            self._profiler.start()
        self._began_s = time.perf_counter()

    def _close(self) -> None:
        took_s, steps = time.perf_counter() - self._began_s, _STEPS[self._mode]
        found: dict[str, Any] = {"step_ms": took_s / steps * 1e3}
        found["parts_ms"] = {
            name: [sum(times) / steps * 1e3, len(times) / steps]
            for name, times in self._times.items()
        }
        if self._mode == "profiled":
            self._profiler.stop()
            found |= _profiled(self._profiler.key_averages(), took_s, steps)
        self._found[self._mode] = found


def _profiled(rows: Any, took_s: float, steps: int) -> dict[str, Any]:  # noqa: ANN401 - torch's
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    busy_us = sum(row.self_device_time_total for row in kernels)
    kernels.sort(key=lambda row: -row.self_device_time_total)
    calls = [row for row in rows if row.device_type == torch.autograd.DeviceType.CPU]
    calls.sort(key=lambda row: -row.self_cpu_time_total)
    return {
        "gpu_busy_share": busy_us * 1e-6 / took_s,
        "kernels_us": [
            [row.key[:110], row.self_device_time_total / steps, row.count / steps]
            for row in kernels[:_ROWS]
        ],
        "calls_us": [
            [row.key[:80], row.self_cpu_time_total / steps, row.count / steps]
            for row in calls[:_ROWS]
        ],
    }


def watch(folder: Path) -> None:
    """Times the steps of the engine that this process starts next, from when `begin` is called."""
    from vllm.v1.engine.core import EngineCore

    steps = _Steps(folder)
    for path in PARTS:
        module, _, name = path.partition(":")
        owner, method = name.split(".")
        found = getattr(importlib.import_module(module), owner)
        call = steps.timed(f"{owner}.{method}", getattr(found, method))
        setattr(found, method, call)
    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, steps.step(getattr(EngineCore, name)))


def begin(folder: Path) -> None:
    """Asks for the next steps."""
    (folder / _BEGIN).touch()


def found(folder: Path) -> dict[str, Any] | None:
    """The times of a step, once all were taken."""
    file = folder / _FOUND
    return json.loads(file.read_text()) if file.exists() else None


def lines(found: dict[str, Any]) -> list[str]:
    """The times as text."""
    said = []
    for mode, values in found.items():
        said.append(f"{mode}: {values['step_ms']:.2f} ms a step")
        for name, (spent_ms, calls) in values["parts_ms"].items():
            said.append(f"  {spent_ms:8.3f} ms  {calls:6.2f} calls  {name}")
        if "gpu_busy_share" in values:
            said.append(f"  GPU busy {values['gpu_busy_share']:.2f}")
        for kind in ("kernels_us", "calls_us"):
            for name, spent_us, count in values.get(kind, []):
                said.append(f"  {kind} {spent_us:9.1f} us {count:7.2f}x {name}")
    return said
