"""A plan of recomputed layers changes no bit of what is trained, but for adapters."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.core.settings.config import Config
from support.ranks.parity_layouts import SP, batches
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import kept, opened, settings_of
from support.ranks.role_ranks import judged

LAYOUTS: dict[str, tuple[int, dict]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"parallel": SP}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    # The critic alone is trained.
    "critic": (1, {}),
    # No input of the first layer has a gradient.
    "lora": (1, {}),
}
# name -> layout, and whether memory is planned for
JOBS = {
    f"{name}{kind}": (name, bool(kind)) for name in LAYOUTS for kind in ("", "-planned")
}
STEPS = 3


class Memory:
    """Memory of which a layer takes 1,000 bytes; from the second pass on there is too little."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from slipstream.learner.trainer.model import recompute

        self._now = 0
        patch.setattr(torch.cuda, "memory_allocated", self._allocated)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: self._now)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        patch.setattr(recompute, "memory_limit", lambda: self._now)

    def _allocated(self) -> int:
        self._now += 1000
        return self._now


def config_of(folder: Path, job: str) -> Config:
    layout, _ = JOBS[job]
    world_size, learner = LAYOUTS[layout]
    tables: dict[str, dict[str, dict[str, object]]] = {
        "critic": {
            "algorithm": {"advantage": "gae"},
            "critic": {"learning_rate": 1e-3},
        },
        "lora": {"lora": {"rank": 4, "alpha": 8.0}},
    }
    settings = {"learner": learner | {"world_size": world_size}}
    return settings_of(folder / "llama", settings, tables.get(layout, {}))


def run_rank(folder: Path, job: str) -> None:
    from slipstream.extensions.other_models.trainer import Roles
    from slipstream.learner.trainer.model.model import unwrapped
    from slipstream.learner.trainer.model.recompute import Recompute
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(folder, job)
    policy: Any = opened(config)
    critic = Roles(config, policy).critic
    model = policy if critic is None else critic.model
    assert model.recompute is None
    patch = pytest.MonkeyPatch()
    if JOBS[job][1]:
        Memory(patch)
        plan = Recompute(list(map(unwrapped, model.chunks)), config.learner)
        model = dataclasses.replace(model, recompute=plan)
    if critic is not None:
        # Without a GPU nothing gives a model its plan.
        critic.model = model
    training = TrainingStep(model, config) if critic is None else None
    recomputed = []
    metrics = []
    for batch in batches(config)[:STEPS]:
        if training is not None:
            metrics.append(training.run(batch).metrics)
        else:
            values = critic.values(batch)
            metrics.append(critic.train(judged(batch, values), batch.mini_batches(1)))
        recomputed.append(
            model.recompute.num_layers if model.recompute is not None else 0
        )
    layers = len(model.chunks[0].module.decoder.layers)
    weights = [p.detach().clone() for p in model.chunks[0].parameters()]
    facts = {
        "weights": weights,
        "recomputed": recomputed,
        "layers": layers,
        "metrics": metrics,
    }
    patch.undo()
    kept(policy, facts, folder / f"{job}.pt")


# Other metrics may be no number.
COMPARED = ("loss", "entropy", "grad_norm", "kl", "logprob_gap_max")
COMPARED_OF_CRITIC = ("value_loss", "critic_grad_norm", "value_mean")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    sizes = {job: LAYOUTS[layout][0] for job, (layout, _) in JOBS.items()}
    return rank_pool.found(__file__, sizes, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_layers_train_the_same_bits(
    layout: str, found: dict[str, dict]
) -> None:
    plain = found[layout]
    planned = found[f"{layout}-planned"]
    # Autograd adds the gradients of an adapter's input and of its layer's in another order.
    bound = 1e-7 if layout == "lora" else 0.0
    for ours, theirs in zip(planned["weights"], plain["weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=bound)
    compared = COMPARED_OF_CRITIC if layout == "critic" else COMPARED
    for ours, theirs in zip(planned["metrics"], plain["metrics"], strict=True):
        expected = {
            key: pytest.approx(theirs[key], rel=10 * bound, abs=0.0) for key in compared
        }
        assert {key: ours[key] for key in compared} == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_pass_leaves_one_layer_and_later_ones_follow_the_plan(layout, found):
    planned = found[f"{layout}-planned"]
    layers = planned["layers"]
    # No memory is left: the last layer is recomputed too.
    assert planned["recomputed"] == [layers - 1, layers, layers]
    assert found[layout]["recomputed"] == [0, 0, 0]
