"""Tokens are scored by the learner with the weights that sampled them, in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from slipstream.core.errors import RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion, Trajectory, VersionSpan
from slipstream.learner.trainer.batches.batch import Batch
from support.ranks.parity_layouts import DISTRIBUTED_OPTIMIZER, OFFLOAD, SP, batches
from support.ranks.rank_pool import RankPool
from support.ranks.rank_program import STEPS, kept, opened, settings_of

if TYPE_CHECKING:
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
    from slipstream.learner.trainer.model.policy import Policy
    from slipstream.learner.trainer.step import StepPart

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

MAX_STALENESS = 2
# The version whose checkpoint is loaded: both others are older.
SAVED = 2
DIGEST = b"\1" * 16
ADAPTERS = ("math", "code")
LORA = {"rank": 4, "alpha": 8.0}
SEVERAL = {
    **LORA,
    "adapters": list(ADAPTERS),
    "publish": "adapters",
}
# Tables of settings that differ.
JOBS: dict[str, dict] = {
    "one": {},
    "offload": {"learner": OFFLOAD},
    "tp2-sp": {"learner": {"parallel": SP}},
    "pp2": {"learner": {"parallel": {"pp": 2}}},
    "dp2": {"learner": DISTRIBUTED_OPTIMIZER},
    "lora": {"lora": LORA},
    "adapters": {"lora": SEVERAL},
    "float16": {},
    # The oldest version is dropped before the last step.
    "shorter": {"algorithm": {"max_staleness": 1}},
}
OF_TWO_RANKS = ("tp2-sp", "pp2", "dp2")


def world_size_of(job: str) -> int:
    return 2 if job in OF_TWO_RANKS else 1


def config_of(job: str, folder: Path) -> Config:
    changes: dict[str, dict] = {
        "run": {"dir": str(folder / "runs"), "name": job},
        "algorithm": {
            "max_staleness": MAX_STALENESS,
            "weight": "split",
            "weight_args": {"staleness_cap": 1.01},
            # The first step, too, has a rate.
            "warmup_steps": 0,
        },
    }
    ranks = {"learner": {"world_size": world_size_of(job)}}
    dtype = "float32"
    if job == "float16":
        dtype = "float16"
    return settings_of(
        folder / "llama",
        changes,
        ranks,
        JOBS[job],
        dtype=dtype,
    )


def aged(trajectory: Trajectory, step: int, max_staleness: int) -> Trajectory:
    """Its tokens are of all versions that it may have, the oldest first."""
    versions = range(max(0, step - max_staleness), step + 1)
    tokens = np.arange(trajectory.num_sampled_tokens)
    parts = np.array_split(tokens, len(versions))
    spans: list[VersionSpan] = []
    for part, version in zip(parts, versions, strict=True):
        if len(part):
            sampler = PolicyVersion(0, version)
            spans.append(VersionSpan(len(part), sampler))
    return dataclasses.replace(trajectory, version_spans=tuple(spans))


def aged_batches(config: Config) -> list[Batch]:
    """With several adapters the second step trains the first one alone."""
    names = config.lora.adapters or ("",)
    changed: list[Batch] = []
    for batch in batches(config):
        trajectories: list[Trajectory] = []
        for place, trajectory in enumerate(batch.trajectories):
            group = place // config.algorithm.group_size
            adapter = names[group % len(names)]
            if batch.step == 1:
                adapter = names[0]
            own_trajectory = dataclasses.replace(trajectory, adapter=adapter)
            trajectories.append(
                aged(
                    own_trajectory,
                    batch.step,
                    config.algorithm.max_staleness,
                )
            )
        own_batch = dataclasses.replace(batch, trajectories=tuple(trajectories))
        changed.append(own_batch)
    return changed


def of_version(batch: Batch, version: int) -> list[TrainingSequence]:
    """The sequences with tokens of a version, as if only these were trained."""
    from slipstream.learner.trainer.batches.training_sequence import TrainingSequence

    sequences = TrainingSequence.of_trajectories(
        batch.trajectories,
        step=batch.step,
    )
    masked: list[TrainingSequence] = []
    for sequence in sequences:
        versions = batch.step - sequence.lags
        mask = sequence.loss_mask & (versions == version)
        if mask.any():
            masked.append(dataclasses.replace(sequence, loss_mask=mask))
    return masked


def scores_now(
    policy: Policy, config: Config, all_batches: Sequence[Batch], version: int
) -> dict:
    """What the policy, as it is, says of the tokens of later batches that it will have sampled."""
    from slipstream.learner.trainer.model.schedule import (
        forward_logprobs,
        masked_outputs,
    )

    forward = functools.partial(
        forward_logprobs,
        policy,
        temperature=config.sampling.temperature,
    )
    scores = {}
    for batch in all_batches:
        for name, own_batch in batch.by_adapter(policy.adapters.names):
            sequences = of_version(own_batch, version)
            if sequences and batch.step > version:
                with policy.adapters.active(name):
                    outputs = masked_outputs(policy, sequences, forward)
                joined = np.concatenate(outputs)
                scores[batch.step, version, name] = torch.from_numpy(joined)
    return scores


@contextlib.contextmanager
def noted(part: StepPart, estimates: dict) -> Iterator[None]:
    """Notes what the part estimates of each version's tokens."""
    real = part.estimates

    def noting(batch: Batch, stages: object) -> object:
        result = real(batch, stages)
        name = batch.trajectories[0].adapter
        for version in range(batch.step):
            values = []
            pairs = zip(batch.trajectories, result, strict=True)
            for trajectory, estimate in pairs:
                spans = trajectory.version_spans
                steps = np.repeat(
                    [span.version.step for span in spans],
                    [span.length for span in spans],
                )
                values.append(estimate.versions[steps == version])
            joined = np.concatenate(values)
            if joined.size:
                estimates[batch.step, version, name] = torch.from_numpy(joined)
        return result

    part.estimates = noting
    yield
    del part.estimates


def num_tokens_of(batch: Batch, version: int) -> int:
    number = 0
    for trajectory in batch.trajectories:
        for span in trajectory.version_spans:
            if span.version.step == version:
                number += span.length
    return number


class Line:
    """A training by parts of its own, with the policy of the others."""

    def __init__(self, policy: Policy, config: Config) -> None:
        from slipstream.extensions.staleness_split.trainer import VersionScores
        from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
        from slipstream.learner.trainer.checkpoints.stored_model import stored_policy
        from slipstream.learner.trainer.parts import step_parts
        from slipstream.learner.trainer.step import TrainingStep

        parts = step_parts(config, policy)
        (self.part,) = (part for part in parts if isinstance(part, VersionScores))
        self.stored = self.part.stored_models()
        self.step = TrainingStep(policy, config, parts)
        self.checkpointer = Checkpointer(
            config,
            policy.ranks,
            [*stored_policy(policy), *self.stored],
        )
        self.estimates: dict = {}
        self.metrics: list[dict[str, float]] = []

    def train(self, batch: Batch) -> None:
        with noted(self.part, self.estimates):
            trained = self.step.run(batch)
        self.metrics.append(trained.metrics)


def tensors_of(policy: Policy) -> list[torch.Tensor]:
    """Copies of the parameters, with those of each adapter."""
    from slipstream.learner.trainer.model.model import MemoryPart, parameters

    copies: list[torch.Tensor] = []
    with policy.memory.resident(MemoryPart.PARAMETERS):
        for name in policy.adapters.names:
            with policy.adapters.active(name):
                own_parameters = parameters(policy.chunks)
                copies.extend(
                    parameter.detach().clone() for parameter in own_parameters
                )
    return copies


def run_rank(folder: Path, job: str) -> None:
    from slipstream.learner.trainer.held_state import HeldState
    from slipstream.learner.trainer.model.model import MemoryPart

    config = config_of(job, folder)
    policy = opened(config)
    all_batches = aged_batches(config)
    resident = functools.partial(
        policy.memory.resident,
        MemoryPart.PARAMETERS,
        MemoryPart.OPTIMIZER,
    )
    saved_version = PolicyVersion(0, SAVED)
    line = Line(policy, config)
    state: HeldState | None = None
    expected: dict = {}
    for batch in all_batches:
        if batch.step == SAVED:
            with resident():
                line.checkpointer.save(saved_version, DIGEST)
                line.checkpointer.finish()
            if not policy.adapters.are_several:
                state = HeldState(policy, line.stored)
        expected |= scores_now(
            policy,
            config,
            all_batches,
            batch.step,
        )
        line.train(batch)
    trained = tensors_of(policy)
    estimates = line.estimates
    kept_versions: dict[str, list[int]] = {}
    for name, copies in line.part._copies.items():
        kept_versions[name] = sorted(copies)
    again: dict[str, dict] = {}

    def train_again(name: str, other: Line) -> None:
        other.part.holds(saved_version)
        other.train(all_batches[SAVED])
        are_equal = map(torch.equal, tensors_of(policy), trained)
        again[name] = {
            "metrics": other.metrics[-1],
            "estimates": other.estimates,
            "equal": all(are_equal),
        }

    loaded = Line(policy, config)
    with resident():
        loaded.checkpointer.load(SAVED)
    train_again("loaded", loaded)
    if state is not None:
        # The line that has gone on goes back.
        state.restore(line.stored)
        line.estimates = {}
        train_again("held", line)
    # A restart has trained the newest step again with another result.
    retrained = Line(policy, config)
    with resident():
        retrained.checkpointer.load(SAVED)
    retrained.part.holds(PolicyVersion(1, SAVED))
    retrained.train(all_batches[SAVED])
    without_copies = Line(policy, config)
    without_copies.part.holds(saved_version)
    error = ""
    try:
        without_copies.train(all_batches[SAVED])
    except RunFailed as failure:
        error = str(failure)
    result = {
        "expected": expected,
        "estimates": estimates,
        "metrics": line.metrics[:STEPS],
        "again": again,
        "kept": kept_versions,
        "error": error,
        "retrained": retrained.metrics[-1]["retrained_version_tokens"],
        "newest": num_tokens_of(all_batches[SAVED], SAVED),
    }
    kept(policy, result, folder / f"{job}.pt")


@pytest.fixture(scope="module")
def results(folder: Path, rank_pool: RankPool) -> dict[str, dict]:
    sizes = {job: world_size_of(job) for job in JOBS}
    return rank_pool.found(__file__, sizes, folder)


@pytest.mark.parametrize("job", JOBS)
def test_each_token_has_the_bits_of_the_version_that_sampled_it(
    job, results: dict[str, dict]
):
    result = results[job]
    keys = {(1, 0), (2, 1)}
    if job != "shorter":
        keys.add((2, 0))
    assert {key[:2] for key in result["estimates"]} == keys
    assert result["estimates"].keys() == result["expected"].keys()
    for key, expected in result["expected"].items():
        assert torch.equal(result["estimates"][key], expected), key
    # Versions differ, or their order would be of no matter.
    assert result["metrics"][2]["staleness_gap_max"] > 1e-3


@pytest.mark.parametrize("job", JOBS)
def test_no_more_versions_are_kept_than_a_batch_may_have(
    job, results: dict[str, dict]
) -> None:
    max_staleness = MAX_STALENESS
    if job == "shorter":
        max_staleness = 1
    last = STEPS - 1
    for versions in results[job]["kept"].values():
        assert min(versions) >= last - max_staleness
        assert max(versions) <= last


@pytest.mark.parametrize("job", JOBS)
def test_a_checkpoint_has_the_versions_of_later_batches(
    job, results: dict[str, dict]
) -> None:
    result = results[job]
    names = {"loaded"} if job == "adapters" else {"held", "loaded"}
    assert result["again"].keys() == names
    for line, again in result["again"].items():
        assert again["equal"], line
        before = result["metrics"][SAVED]
        for name, value in again["metrics"].items():
            if not name.endswith("_s"):
                assert value == before[name], (line, name)
        for key, logprobs in again["estimates"].items():
            assert torch.equal(logprobs, result["estimates"][key]), (line, key)


@pytest.mark.parametrize("job", [*OF_TWO_RANKS, "offload"])
def test_layouts_give_the_values_of_one_rank(
    job: str, results: dict[str, dict]
) -> None:
    estimates = results[job]["estimates"]
    for key, expected in results["one"]["estimates"].items():
        torch.testing.assert_close(
            estimates[key],
            expected,
            rtol=1e-5,
            atol=2e-5,
        )


@pytest.mark.parametrize("job", JOBS)
def test_tokens_of_a_step_that_is_another_now_are_counted(
    job: str, results: dict[str, dict]
):
    result = results[job]
    assert result["retrained"] == result["newest"] > 0
    assert result["metrics"][SAVED]["retrained_version_tokens"] == 0


@pytest.mark.parametrize("job", JOBS)
def test_weights_that_are_gone_are_told(job: str, results: dict[str, dict]) -> None:
    error = results[job]["error"]
    assert "has tokens of version" in error
    assert error.endswith(f"the oldest weights that are kept are of version {SAVED}")
