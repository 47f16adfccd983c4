"""A policy with adapters needs no second model as its reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.configuration.roles import reference_is_policy, role_settings
from slipstream.core.settings.config import Config
from support.ranks.parity_layouts import SHARED, SP, TREES, batches
from support.ranks.rank_pool import RankPool
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
    settings = {"learner": learner | {"world_size": world_size}}
    return settings_of(folder / "llama", settings, tables)


def run_rank(folder: Path, job: str) -> None:
    from slipstream.core.settings.role_sections import ReferenceSection
    from slipstream.extensions.other_models.trainer import (
        PolicyAsReference,
        Reference,
        Roles,
    )
    from slipstream.learner.trainer.parts import step_parts
    from slipstream.learner.trainer.step import TrainingStep

    config = config_of(job, folder)
    policy = opened(config)
    parts = step_parts(config, policy)
    reference = next(
        (part.reference for part in parts if isinstance(part, Roles)), None
    )
    step = TrainingStep(policy, config, parts)
    first, second = batches(config)[:2]
    metrics = [step.run(first).metrics]
    logprobs = {}
    if reference is not None:
        # A table of its own makes the reference another model.
        other = config.model_copy(
            update={"reference": ReferenceSection(path=config.model.path)}
        )
        settings = role_settings(other)["reference"]
        logprobs["bare"] = PolicyAsReference(
            policy, config, keeps_adapters=False
        ).logprobs(second)
        logprobs["own"] = Reference(settings, policy.ranks).logprobs(second)
    # The adapters are on again.
    metrics.append(step.run(second).metrics)
    joined = {
        name: torch.from_numpy(
            np.concatenate([estimates.logprobs for estimates in estimates_of_batch])
        )
        for name, estimates_of_batch in logprobs.items()
    }
    kind = type(reference).__name__
    kept(policy, {"metrics": metrics, "kind": kind, **joined}, folder / f"{job}.pt")


NUM_LAYERS = 2
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def found(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    return rank_pool.found(
        __file__, {job: size for job, (size, _) in JOBS.items()}, folder
    )


@pytest.mark.parametrize("job", WITH_REFERENCE)
def test_switched_off_adapters_leave_the_model_of_the_folder(
    job: str, found: dict[str, dict]
):
    result = found[job]
    assert result["kind"] == "PolicyAsReference"
    torch.testing.assert_close(result["bare"], result["own"], rtol=1e-6, atol=1e-6)
    first, second = result["metrics"]
    # New adapters have no effect; after a step the policy has left its reference.
    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl_reference"] > 1e-7
    expected = found["one-alone" if job in SHARING else "one"]["metrics"][1][
        "kl_reference"
    ]
    assert second["kl_reference"] == pytest.approx(expected, rel=1e-4)


def test_a_pass_without_adapters_counts_in_no_step(found: dict[str, dict]) -> None:
    for metrics, plain in zip(
        found["one-shared"]["metrics"],
        found["without-reference"]["metrics"],
        strict=True,
    ):
        assert metrics["shared_tokens"] == plain["shared_tokens"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": {"rank": 0}},
        {"reference": {"path": "models/other"}},
        {"reference": {"refresh_every_steps": 2}},
    ],
)
def test_a_reference_that_differs_is_a_model_of_its_own(
    changes: dict, folder: Path
) -> None:
    table = config_of("one", folder).model_dump(mode="json", exclude_none=True)
    bare = parse_config(table, source="test")
    assert reference_is_policy(bare)
    assert role_settings(bare) == {}
    assert not reference_is_policy(parse_config(table | changes, source="test"))
