"""The program of ranks that train with a plan of recomputed layers, and without.

What a job saw lies in FOLDER/recompute-JOB.pt afterwards.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from slipstream.protocol.settings.config_file import parse_config

from support.ranks.parity_layouts import SETTINGS, SP, batches

LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"parallel": SP}),
    "pp2": (2, {"parallel": {"pp": 2}}),
}
# name -> layout, and whether memory is planned for
JOBS = {f"{name}{kind}": (name, bool(kind)) for name in LAYOUTS for kind in ("", "-planned")}
STEPS = 3


class Memory:
    """Memory of which a layer takes 1,000 bytes; from the second pass on there is too little."""

    def __init__(self) -> None:
        self._now = 0

    def allocated(self) -> int:
        self._now += 1000
        return self._now

    def peak(self) -> int:
        return self._now

    def watch(self) -> None:
        pass

    def limit(self) -> int:
        return self._now


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a job does."""
    from slipstream.learner.trainer.model.model import unwrapped
    from slipstream.learner.trainer.model.recompute import Recompute
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    layout, is_planned = JOBS[job]
    world_size, learner = LAYOUTS[layout]
    table = json.loads(json.dumps(SETTINGS))
    table["model"] = {"path": str(folder / "llama"), "dtype": "float32"}
    table["learner"] |= learner | {"world_size": world_size}
    config = parse_config(table, source=job)
    policy = open_policy(config, Launch.from_environment())
    assert policy.recompute is None
    if is_planned:
        memory: Any = Memory()
        plan = Recompute(list(map(unwrapped, policy.chunks)), config.learner, memory)
        policy = dataclasses.replace(policy, recompute=plan)
    step = TrainingStep(policy, config)
    recomputed = []
    metrics = []
    for batch in batches(config)[:STEPS]:
        metrics.append(step.run(batch).metrics)
        recomputed.append(policy.recompute.num_layers if policy.recompute is not None else 0)
    layers = len(policy.chunks[0].module.decoder.layers)
    if policy.ranks.is_main:
        weights = [p.detach().clone() for p in policy.chunks[0].parameters()]
        found = {"weights": weights, "recomputed": recomputed, "layers": layers, "metrics": metrics}
        torch.save(found, folder / f"recompute-{job}.pt")
    policy.ranks.close()
