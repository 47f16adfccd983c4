"""The program of ranks that compare the policy without its adapters with a model of its own.

What a job saw lies in FOLDER/bare-JOB.pt afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config

from support.ranks.parity_layouts import SETTINGS, SHARED, SP, TREES, batches

# Jobs whose episodes have branches with common beginnings.
SHARING = ("one-alone", "one-shared", "without-reference")
# name -> (ranks, settings of the learner)
JOBS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "one-alone": (1, {}),
    "one-shared": (1, SHARED),
    "without-reference": (1, SHARED),
    "tp2-sp": (2, {"parallel": SP}),
    "pp2": (2, {"parallel": {"pp": 2}}),
}
WITH_REFERENCE = [name for name in JOBS if name != "without-reference"]


def config_of(job: str, folder: Path) -> Config:
    world_size, learner = JOBS[job]
    table = json.loads(json.dumps(SETTINGS))
    table["model"] = {"path": str(folder / "llama"), "dtype": "float32"}
    table["learner"] |= learner | {"world_size": world_size}
    if job in SHARING:
        table["sampling"] |= TREES
    table["lora"] = {"rank": 4, "alpha": 8.0}
    if job in WITH_REFERENCE:
        table["algorithm"]["kl"] = {"coefficient": 0.1, "estimator": "k2"}
    return parse_config(table, source=job)


def run_rank(folder: Path, job: str) -> None:
    """What every rank of a job does."""
    from slipstream.core.configuration.roles import reference_config
    from slipstream.core.settings.role_sections import ReferenceSection
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.roles.reference import PolicyWithoutAdapters, Reference
    from slipstream.learner.trainer.roles.roles import open_roles
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(job, folder)
    policy = open_policy(config, Launch.from_environment())
    roles = open_roles(config, policy)
    step = TrainingStep(policy, config, roles)
    first, second = batches(config)[:2]
    metrics = [step.run(first).metrics]
    found = {}
    if roles.reference is not None:
        # A table of its own makes the reference another model.
        other = config.model_copy(update={"reference": ReferenceSection(dtype="float32")})
        settings = reference_config(other)
        assert settings is not None
        found["bare"] = PolicyWithoutAdapters(policy, config).logprobs(second)
        found["own"] = Reference(settings, policy.ranks).logprobs(second)
    # The adapters are on again.
    metrics.append(step.run(second).metrics)
    if policy.ranks.is_main:
        joined = {
            name: torch.from_numpy(np.concatenate([one.logprobs for one in each]))
            for name, each in found.items()
        }
        kind = type(roles.reference).__name__
        torch.save({"metrics": metrics, "kind": kind, **joined}, folder / f"bare-{job}.pt")
    policy.ranks.close()
