"""verl's own formulas, imported without the packages around them.

verl's `__init__` wants ray and more; the formulas need torch and numpy alone. Packages are entered
as empty shells, and names that only annotations use as classes without content.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

SHELLS = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers")
ANNOTATIONS = {
    "tensordict": ["TensorDict"],
    "verl.protocol": ["DataProto"],
    "verl.trainer.config": ["AlgoConfig"],
    "verl.trainer.config.algorithm": ["RolloutCorrectionConfig"],
    "verl.workers.config.actor": ["PolicyLossConfig"],
}


@dataclass
class ActorConfig:
    """What the losses read of verl's configuration of the same name."""

    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 1e9
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    gamma: float = 1.0
    global_batch_info: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@cache
def core_algos() -> ModuleType:
    _enter()
    return importlib.import_module("verl.trainer.ppo.core_algos")


@cache
def rollout_correction() -> ModuleType:
    _enter()
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


@cache
def _enter() -> None:
    spec = importlib.util.find_spec("verl")
    root = Path(spec.submodule_search_locations[0])
    for name in SHELLS:
        shell = ModuleType(name)
        shell.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = shell
    for name, classes in ANNOTATIONS.items():
        sys.modules[name] = ModuleType(name)
        for node in classes:
            setattr(sys.modules[name], node, type(node, (), {}))
    sys.modules["verl.workers.config"] = ModuleType("verl.workers.config")
    sys.modules["verl.workers.config"].ActorConfig = ActorConfig
    groupwise = importlib.import_module("verl.utils.groupwise")
    sys.modules["verl.utils"].as_torch_index = groupwise.as_torch_index
    sys.modules["verl.utils"].group_mean_std = groupwise.group_mean_std
