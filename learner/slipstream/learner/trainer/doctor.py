"""Examines torch, NCCL and TransformerEngine: `python -m slipstream.learner.trainer.doctor`.

It prints one line of JSON for each finding, with the keys area, verdict ("ok", "advice",
"problem"), seen (the observation) and remedy.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from typing import TypeAlias

import torch

# (area, verdict, seen, remedy)
Line: TypeAlias = tuple[str, str, str, str]

GIB = 1 << 30
# Hopper; older GPUs run, but were not tested.
TESTED_CAPABILITY = (9, 0)


def main() -> int:
    """Prints all findings and returns 0, even for problems."""
    for area, verdict, seen, remedy in findings():
        line = {"area": area, "verdict": verdict, "seen": seen, "remedy": remedy}
        print(json.dumps(line), flush=True)
    return 0


def findings() -> Iterator[Line]:
    """Yields all findings that need torch."""
    if not torch.cuda.is_available():
        # `slipstream doctor` itself reports a build for CPUs, as it knows if a GPU is needed.
        if torch.version.cuda is not None:
            seen = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"
            remedy = "check nvidia-smi and the driver, or install torch's CPU build"
            yield "gpu", "problem", f"{seen} and sees no GPU", remedy
        return
    yield from _gpus()
    yield _nccl()
    yield _attention()


def _gpus() -> Iterator[Line]:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        seen = f"{index}: {properties.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB are free"
        capability = (properties.major, properties.minor)
        if capability < TESTED_CAPABILITY:
            known = ".".join(map(str, TESTED_CAPABILITY))
            yield "gpu", "advice", seen, f"tested were GPUs of compute capability {known} and later"
        elif free < total / 2:
            yield "gpu", "advice", seen, "another program holds its memory: see nvidia-smi"
        else:
            yield "gpu", "ok", seen, ""


def _nccl() -> Line:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    ours = ".".join(map(str, version))
    if importlib.util.find_spec("cupy") is None:
        return "nccl", "problem", f"torch has {ours}, cupy is not installed", "install cupy-cuda13x"
    from cupy.cuda import nccl

    number = nccl.get_version()
    theirs = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    # vLLM's own communicators use torch's NCCL, unless this variable names another.
    engine = os.environ.get("VLLM_NCCL_SO_PATH", "torch's")
    seen = f"torch {ours}, cupy {theirs}, vLLM {engine}"
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        return "nccl", "advice", seen, "install the same NCCL for both"
    return "nccl", "ok", seen, ""


def _attention() -> Line:
    if importlib.util.find_spec("transformer_engine") is None:
        seen = "TransformerEngine is not installed: attention by torch"
        return "attention", "advice", seen, "install transformer-engine[pytorch], it is faster"
    import transformer_engine

    flash = "with" if importlib.util.find_spec("flash_attn") is not None else "without"
    seen = f"TransformerEngine {transformer_engine.__version__}, {flash} flash-attn"
    return "attention", "ok", seen, ""


if __name__ == "__main__":
    sys.exit(main())
