"""The program of ranks that compare the policy without its adapters with a model of its own.

What a job saw lies in FOLDER/JOB.pt afterwards.
"""

from pathlib import Path

import numpy as np
import torch
from slipstream.core.settings.config import Config

from support.ranks.parity_layouts import SHARED, SP, TREES, batches
from support.ranks.rank_program import kept, opened, settings_of

# Jobs whose episodes have branches with shared prefixes.
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
    tables: dict = {"lora": {"rank": 4, "alpha": 8.0}}
    if job in SHARING:
        tables["sampling"] = TREES
    if job in WITH_REFERENCE:
        tables["algorithm"] = {"kl": {"coefficient": 0.1, "estimator": "k2"}}
    own = {"learner": learner | {"world_size": world_size}}
    return settings_of(folder / "llama", own, tables)


def run_rank(folder: Path, job: str) -> None:
    from slipstream.core.configuration.roles import reference_config
    from slipstream.core.settings.role_sections import ReferenceSection
    from slipstream.extensions.other_models.trainer import (
        PolicyWithoutAdapters,
        Reference,
        Roles,
    )
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(job, folder)
    policy = opened(config)
    parts = step_parts(config, policy)
    own = next((part.reference for part in parts if isinstance(part, Roles)), None)
    step = TrainingStep(policy, config, parts)
    first, second = batches(config)[:2]
    metrics = [step.run(first).metrics]
    found = {}
    if own is not None:
        # A table of its own makes the reference another model.
        other = config.model_copy(update={"reference": ReferenceSection(path=config.model.path)})
        settings = reference_config(other)
        assert settings is not None
        found["bare"] = PolicyWithoutAdapters(policy, config).logprobs(second)
        found["own"] = Reference(settings, policy.ranks).logprobs(second)
    # The adapters are on again.
    metrics.append(step.run(second).metrics)
    joined = {
        name: torch.from_numpy(np.concatenate([one.logprobs for one in each]))
        for name, each in found.items()
    }
    kind = type(own).__name__
    kept(policy, {"metrics": metrics, "kind": kind, **joined}, folder / f"{job}.pt")
