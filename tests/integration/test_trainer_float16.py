"""The trainer in 16 bits: as good as float32 but for rounding, and what follows from its range."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.config import Config
from support.fakes.parity_models import make_models
from support.ranks.parity_layouts import batches, config_of
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import opened
from support.rigs import parity_run

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
        (target / "config.json").write_text(
            (folder / "llama" / "config.json").read_text()
        )
        scaled = tensors | {
            matrix: tensors[matrix] * factor for matrix, factor in factors.items()
        }
        save_file(scaled, target / "model.safetensors", metadata={"format": "pt"})


def run_rank(folder: Path, job: str) -> None:
    """A rank's part of a job; FOLDER/JOB-RANK.json says what happened.

    "stuck" has a scale of the loss that cannot fall, "parts" is a mixture. Others name a type of
    numbers, too: a critic, or a model with activations or weights that are too large.
    """
    from slipstream.learner.trainer.ranks.parallel import Launch

    launch = Launch.from_environment()
    name, _, dtype = job.partition("@")
    settings = {"stuck": stuck, "parts": parts}
    if job in settings:
        values: object = settings[job](folder)
    elif name == "critic":
        values = critic(folder, dtype)
    else:
        layout = "one" if launch.world_size == 1 else "pp2"
        config = config_of(
            f"{layout}@{dtype}", folder, model={"path": str(folder / name)}
        )
        policy, step = opened_step(config)
        values = ""
        try:
            step.run(batches(config)[0])
        except RunFailed as error:
            values = str(error)
        policy.ranks.close()
    (folder / f"{job}-{launch.rank}.json").write_text(json.dumps(values))


def opened_step(config: Config) -> tuple[Policy, TrainingStep]:
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep

    policy = opened(config)
    return policy, TrainingStep(policy, config, step_parts(config, policy))


def stuck(folder: Path) -> dict:
    """A step whose gradients overflow, with a scale that is at its least."""
    scales = {"initial_loss_scale": 2.0**24, "min_loss_scale": 2.0**24}
    config = config_of("one@float16", folder, learner={"optimizer": scales})
    policy, step = opened_step(config)
    before = [p.clone() for chunk in policy.chunks for p in chunk.parameters()]
    message = ""
    try:
        step.run(batches(config)[0])
    except UntrainableBatch as error:
        message = str(error)
    after = [p for chunk in policy.chunks for p in chunk.parameters()]
    facts = {
        "error": message,
        "is_same": all(map(torch.equal, before, after)),
        "scale": policy.loss_scale,
    }
    policy.ranks.close()
    return facts


def parts(folder: Path) -> dict:
    """A mixture's step, whose dense parameters and experts overflow at different scales."""
    config = config_of("one-moe@float16", folder)
    policy, step = opened_step(config)
    overflows: list[list[bool]] = []
    for part in policy.optimizer.chained_optimizers:
        is_finite: list[bool] = []
        overflows.append(is_finite)
        part._unscale_main_grads_and_check_for_nan = noted(part, is_finite)
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
    settings = {"algorithm": {"advantage": "gae"}, "critic": {"learning_rate": 1e-3}}
    config = config_of(f"one@{dtype}", folder, **settings)
    policy, step = opened_step(config)
    metrics = step.run(batches(config)[0]).metrics
    policy.ranks.close()
    return metrics


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]
PROGRAM = Path(__file__)
LAYOUTS = ("one", "one-moe", "one-gpt-oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16")
    make_models(folder)
    make_large(folder)
    return folder


@pytest.fixture(scope="module")
def by_dtype(rank_pool: RankPool, folder: Path) -> dict[str, dict[str, dict]]:
    """What one rank found, by type of numbers and layout."""
    return {
        dtype: parity_run.run(rank_pool, folder, 1, dtype, LAYOUTS)
        for dtype in ("float32", "float16", "bfloat16")
    }


def answers(pool: RankPool, folder: Path, job: str, world_size: int = 1) -> list:
    """What each rank says about a job."""
    pool.run(PROGRAM, [job], world_size=world_size, folder=folder)
    return [
        json.loads((folder / f"{job}-{rank}.json").read_text())
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_is_nearer_to_float32_than_bfloat16_is(layout, by_dtype):
    exact, fine, coarse = (
        by_dtype[d][layout] for d in ("float32", "float16", "bfloat16")
    )
    # Rounding decides about a route that is as good as another, so a mean would hang on one token.
    gaps = [
        float((rank_values["logprobs"][0] - exact["logprobs"][0]).abs().median())
        for rank_values in (fine, coarse)
    ]
    assert gaps[0] < gaps[1] / 4
    for ours, theirs in zip(fine["metrics"], exact["metrics"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
        # After an update rounding decides about a route or a bound that is as good as reached.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2, abs=6e-3)
        assert ours["trained_tokens"] == theirs["trained_tokens"]
        settings = {"gradient_overflows", "loss_scale"}
        assert theirs.keys() == ours.keys() - settings


def test_passes_that_overflow_are_made_again_with_half_the_scale(by_dtype):
    scale = 2.0**16
    for metrics in by_dtype["float16"]["one"]["metrics"]:
        scale /= 2 ** metrics["gradient_overflows"]
        assert metrics["loss_scale"] == scale
    assert scale < 2.0**16


def test_layouts_train_alike_in_float16(rank_pool: RankPool, folder: Path) -> None:
    names = ["tp2-sp", "pp2", "dp2-distopt", "ep2-distopt-moe"]
    comparison = parity_run.compare(rank_pool, folder, 2, "float16", names)
    assert comparison.keys() == set(names)
    assert max(comparison.values()) <= parity_run.TOLERANCES["float16"], comparison


def test_a_scale_that_cannot_fall_leaves_weights_and_scale_as_they_were(
    rank_pool, folder
):
    (answer,) = answers(rank_pool, folder, "stuck")
    assert answer["error"].startswith("the gradient norm is ")
    assert answer["error"].endswith("; the weights were not changed")
    assert answer["is_same"]
    assert answer["scale"] == 2.0**24


def test_an_overflow_of_one_part_lowers_the_scale_of_all_parameters(
    rank_pool, folder, by_dtype
):
    (answer,) = answers(rank_pool, folder, "parts")
    dense, experts = answer["overflows"]
    # Megatron gives each part a scale of its own, which would be others now.
    assert dense != experts
    assert not dense[-1]
    assert not experts[-1]
    exact = by_dtype["float32"]["one-moe"]["metrics"][0]
    assert answer["metrics"]["grad_norm"] == pytest.approx(exact["grad_norm"], rel=2e-3)
    assert answer["metrics"]["gradient_overflows"] == len(dense) - 1


def test_a_critic_trains_in_float16(rank_pool: RankPool, folder: Path) -> None:
    (ours,), (exact,) = (
        answers(rank_pool, folder, f"critic@float{n}") for n in (16, 32)
    )
    assert ours["critic_gradient_overflows"] >= 0
    assert "critic_gradient_overflows" not in exact
    for name in ("critic_grad_norm", "value_loss", "value_mean"):
        assert ours[name] == pytest.approx(exact[name], rel=1e-2, abs=1e-3), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", ["activations", "weights"])
def test_a_model_that_exceeds_the_range_ends_its_run_at_the_first_step_on_every_rank(
    model: str, world_size: int, rank_pool: RankPool, folder: Path
) -> None:
    all_answers = answers(rank_pool, folder, f"{model}@float16", world_size)
    assert len(set(all_answers)) == 1
    message = (
        r"the loss is nan; .* weights are at fault, not the batch; float16 .* "
        r'= "bfloat16" may'
    )
    assert re.match(message, all_answers[0]), all_answers[0]
    assert (
        answers(rank_pool, folder, f"{model}@bfloat16", world_size) == [""] * world_size
    )


def test_an_exported_folder_is_in_float16(
    folder: Path, by_dtype: dict[str, dict[str, dict]]
):
    final = folder / "one@float16-final"
    assert json.loads((final / "config.json").read_text())["dtype"] == "float16"
    tensors = load_file(final / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    weights = by_dtype["float16"]["one"]["weights"]
    assert all(
        torch.equal(tensor.float(), weights[name]) for name, tensor in tensors.items()
    )
