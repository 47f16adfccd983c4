"""The program of ranks that train in float16, and where its range ends.

FOLDER/JOB-RANK.json says afterwards what happened. "stuck" has a scale of the loss that cannot
fall, "parts" is a mixture. Others name a type of numbers, too: a critic, or a model that is trained
with activations or weights that are too large; two ranks hold its stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.config import Config

from support.ranks.parity_layouts import batches, config_of
from support.ranks.rank_program import opened

if TYPE_CHECKING:
    from slipstream.learner.trainer.model.policy import Policy
    from slipstream.learner.trainer.step import TrainingStep

# Factors of matrices of the Llama's second layer.
DOWN, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "up"))
LARGE = {"activations": {DOWN: 1e5, UP: 10.0}, "weights": {DOWN: 1e7}}


def make_large(folder: Path) -> None:
    """Makes copies of the Llama with matrices that are too large, or make what is too large."""
    tensors = load_file(folder / "llama" / "model.safetensors")
    for name, factors in LARGE.items():
        target = folder / name
        target.mkdir()
        (target / "config.json").write_text((folder / "llama" / "config.json").read_text())
        own = tensors | {matrix: tensors[matrix] * factor for matrix, factor in factors.items()}
        save_file(own, target / "model.safetensors", metadata={"format": "pt"})


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.ranks.parallel import Launch

    launch = Launch.from_environment()
    name, _, dtype = job.partition("@")
    own = {"stuck": stuck, "parts": parts}
    if job in own:
        found: object = own[job](folder)
    elif name == "critic":
        found = critic(folder, dtype)
    else:
        layout = "one" if launch.world_size == 1 else "pp2"
        config = changed(f"{layout}@{dtype}", folder, model={"path": str(folder / name)})
        policy, step = opened_step(config)
        found = ""
        try:
            step.run(batches(config)[0])
        except RunFailed as error:
            found = str(error)
        policy.ranks.close()
    (folder / f"{job}-{launch.rank}.json").write_text(json.dumps(found))


def changed(job: str, folder: Path, **changes: dict) -> Config:
    """The settings of a layout with other values in some tables."""
    table = config_of(job, folder).model_dump(mode="json", exclude_none=True)
    for name, values in changes.items():
        table[name] = table.get(name, {}) | values
    return parse_config(table, source=job)


def opened_step(config: Config) -> tuple[Policy, TrainingStep]:
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep

    policy = opened(config)
    return policy, TrainingStep(policy, config, step_parts(config, policy))


def stuck(folder: Path) -> dict:
    """A step whose gradients overflow, with a scale that is at its least."""
    scales = {"initial_loss_scale": 2.0**24, "min_loss_scale": 2.0**24}
    config = changed("one@float16", folder, learner={"optimizer": scales})
    policy, step = opened_step(config)
    before = [p.clone() for chunk in policy.chunks for p in chunk.parameters()]
    said = ""
    try:
        step.run(batches(config)[0])
    except UntrainableBatch as error:
        said = str(error)
    after = [p for chunk in policy.chunks for p in chunk.parameters()]
    found = {
        "error": said,
        "is_same": all(map(torch.equal, before, after)),
        "scale": policy.loss_scale,
    }
    policy.ranks.close()
    return found


def parts(folder: Path) -> dict:
    """A mixture's step, whose dense parameters and experts overflow at different scales."""
    config = config_of("one-moe@float16", folder)
    policy, step = opened_step(config)
    overflows: list[list[bool]] = []
    for part in policy.optimizer.chained_optimizers:
        own: list[bool] = []
        overflows.append(own)
        part._unscale_main_grads_and_check_for_nan = noted(part, own)
    metrics = step.run(batches(config)[0]).metrics
    policy.ranks.close()
    return {"overflows": overflows, "metrics": metrics}


def noted(part: Any, own: list[bool]) -> Callable[[], bool]:
    real = part._unscale_main_grads_and_check_for_nan

    def check() -> bool:
        own.append(real())
        return own[-1]

    return check


def critic(folder: Path, dtype: str) -> dict:
    """The metrics of a step with a critic."""
    own = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e-3}}
    config = changed(f"one@{dtype}", folder, **own)
    policy, step = opened_step(config)
    metrics = step.run(batches(config)[0]).metrics
    policy.ranks.close()
    return metrics
