"""Log-probabilities of each token by the learner with the weights that sampled it.

No trained token is more than `algorithm.max_staleness` versions old. So copies of the newest
`max_staleness` + 1 versions are all that is ever needed; each rank keeps those of its own part of
the policy in main memory. A copy is taken before a step changes the weights. While the weights stay
as they are, as those of an adapter without episodes in a batch, several versions share one copy.
"""

import contextlib
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.environment_rules import sampling_temperatures
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray, PolicyVersion
from slipstream.learner.trainer.algorithms.loss import ModelEstimates
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.layers.routers import moves_biases
from slipstream.learner.trainer.model.batch_outputs import by_trajectory
from slipstream.learner.trainer.model.model import MemoryPart, unwrapped
from slipstream.learner.trainer.model.policy import Policy, exchange
from slipstream.learner.trainer.model.schedule import (
    forward_logprobs,
    masked_outputs,
    sequences_here,
)
from slipstream.learner.trainer.step import StepPart
from slipstream.learner.trainer.step_cost import StageTimes
from torch import Tensor

logger = logging.getLogger(__name__)

BoolArray = npt.NDArray[np.bool_]
# The values of one version, in the order of `VersionScores._tensors`.
_Copy = list[Tensor]


class VersionScores(StepPart):
    """Scores the tokens of a batch by the versions that sampled them; keeps the weights of these.

    A checkpoint has the copies that a step behind it may need, as models named `earlier-1` to
    `earlier-MAX_STALENESS`, which stand for the versions before the checkpoint's.
    """

    def __init__(self, config: Config, policy: Policy) -> None:
        """Keeps nothing yet; raises ConfigError for a model that cannot be scored so."""
        self._config = config
        self._policy = policy
        self._max_staleness = config.algorithm.max_staleness
        self._has_biases = moves_biases(policy.chunks[0].config)
        if self._has_biases and config.lora.rank:
            raise ConfigError(
                f"{config.model.path}: algorithm.weight = 'split' excludes lora.rank = "
                f"{config.lora.rank} for a model whose routers' biases move: a checkpoint would "
                "lack the biases of earlier versions"
            )
        # By adapter, "" without names, and by version.
        self._copies: defaultdict[str, dict[int, _Copy]] = defaultdict(dict)
        # The version of the policy's weights, and the oldest version whose weights are known.
        self._version = 0
        self._oldest = 0
        # The incarnation of each version that was in the policy.
        self._incarnations: dict[int, int] = {}
        self._num_retrained = 0

    def stored_models(self) -> list[StoredModel]:
        """Returns the versions before the policy's, as models in the policy's chunks."""
        policy = self._policy
        content: Literal["adapter", "all"] = "all"
        if self._config.lora.rank:
            content = "adapter"
        stored: list[StoredModel] = []
        for name in policy.adapters.names:
            of_adapter = f"{name}-" if policy.adapters.have_names else ""
            stored += [
                StoredModel(
                    f"{of_adapter}earlier-{age}",
                    policy.chunks,
                    None,
                    in_force=functools.partial(self._earlier, name, age),
                    content=content,
                    is_lent=True,
                )
                for age in range(1, self._max_staleness + 1)
            ]
        return stored

    def holds(self, version: PolicyVersion) -> None:
        """Notes the policy's version, which the versions in its stored models come before."""
        shift = version.step - self._version
        for copies in self._copies.values():
            self._shift(copies, shift)
        if shift:
            # The copies of a checkpoint were loaded, if it has any.
            num_loaded = min(map(len, self._copies.values()), default=0)
            self._oldest = max(0, version.step - num_loaded)
            self._incarnations.clear()
        self._version = version.step
        self._incarnations[version.step] = version.incarnation
        self._incarnations.pop(version.step - self._max_staleness - 1, None)

    def _shift(self, copies: dict[int, _Copy], shift: int) -> None:
        """Drops copies that are not before the policy's version, which rises by `shift`."""
        loaded: dict[int, _Copy] = {}
        for age in range(1, self._max_staleness + 1):
            version = self._version - age
            if version in copies:
                loaded[version + shift] = copies[version]
        copies.clear()
        copies.update(loaded)

    def begins(self) -> None:
        self._num_retrained = 0

    def estimates(self, batch: Batch, stages: StageTimes) -> list[ModelEstimates]:
        """Returns the log-probabilities of each trajectory's tokens, 0 for those of lag 0."""
        self._note_retrained(batch)
        adapter = batch.trajectories[0].adapter
        parameters = self._policy.memory.resident(MemoryPart.PARAMETERS)
        with stages.measure("estimates"), parameters:
            self._keep(adapter, batch.step)
            scores = self._scores(batch, adapter)
        return [
            ModelEstimates(versions=logprobs_of_trajectory)
            for logprobs_of_trajectory in by_trajectory(batch, scores)
        ]

    def scored_here(self, batch: Batch) -> set[int]:
        """Returns the sequences that any of the passes of `estimates` gives to this rank."""
        sequences = TrainingSequence.of_trajectories(
            batch.trajectories,
            step=batch.step,
        )
        scored: set[int] = set()
        for lag in _lags(sequences):
            places, masked = _of_lag(sequences, lag)
            for index in sequences_here(self._policy, masked):
                scored.add(places[index])
        return scored

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        self._version = batch.step + 1
        return {"retrained_version_tokens": float(self._num_retrained)}

    def _note_retrained(self, batch: Batch) -> None:
        """Counts tokens of weights that are gone: a step was trained again with another result."""
        counts: Counter[PolicyVersion] = Counter()
        for trajectory in batch.trajectories:
            for span in trajectory.version_spans:
                incarnation = self._incarnations.get(span.version.step, span.version.incarnation)
                if incarnation != span.version.incarnation:
                    counts[span.version] += span.length
        self._num_retrained += counts.total()
        if counts and self._policy.ranks.is_main:
            versions = ", ".join(map(str, counts))
            logger.warning(
                "step %d: %d tokens are of weights that a restart has trained again with another "
                "result (%s): the weights of the same steps stand in for them",
                batch.step + 1,
                counts.total(),
                versions,
            )

    def _scores(self, batch: Batch, adapter: str) -> list[LogprobArray]:
        """Returns, for each sequence, the log-probabilities of its predicted sampled tokens."""
        policy = self._policy
        vision = policy.vision
        sequences = TrainingSequence.of_trajectories(
            batch.trajectories,
            step=batch.step,
            temperatures=sampling_temperatures(
                self._config, [trajectory.environment for trajectory in batch.trajectories]
            ),
            processor=None if vision is None else vision.processor,
            with_experts=self._config.algorithm.router_replay != "off",
        )
        forward = functools.partial(
            forward_logprobs,
            policy,
            temperature=self._config.sampling.temperature,
        )
        sharing = policy.sharing
        saved = None if sharing is None else sharing.saved
        scores: list[LogprobArray] = [
            np.zeros(len(sequence), dtype=np.float32) for sequence in sequences
        ]
        for lag in _lags(sequences):
            places, masked = _of_lag(sequences, lag)
            with self._weights_of(adapter, batch.step, batch.step - lag):
                outputs = masked_outputs(policy, masked, forward)
            for place, sequence, logprobs in zip(places, masked, outputs, strict=True):
                scores[place][sequence.loss_mask] = logprobs
        if sharing is not None and saved is not None:
            # The work that sharing saves in these passes does not count for a training step.
            sharing.saved = saved
        scores_of_targets: list[LogprobArray] = []
        for score, sequence in zip(scores, sequences, strict=True):
            scores_of_targets.append(score[sequence.loss_mask])
        return scores_of_targets

    def _tensors(self) -> list[Tensor]:
        """Returns whatever of the policy a step changes."""
        tensors: list[Tensor] = []
        for wrapped in self._policy.chunks:
            chunk = unwrapped(wrapped)
            tensors.extend(parameter for parameter in chunk.parameters() if parameter.requires_grad)
            if self._has_biases:
                tensors.extend(chunk.buffers())
        return tensors

    @torch.no_grad()
    def _copied(self, tensors: Sequence[Tensor]) -> _Copy:
        is_on_gpu = self._policy.ranks.device.type == "cuda"
        copies: _Copy = []
        for tensor in tensors:
            copy = torch.empty_like(
                tensor,
                device="cpu",
                pin_memory=is_on_gpu,
            )
            copy.copy_(tensor)
            copies.append(copy)
        return copies

    def _keep(self, adapter: str, step: int) -> None:
        """Keeps the weights of version `step`, which the policy has; drops too old ones."""
        copies = self._copies[adapter]
        oldest = step - self._max_staleness
        for version in sorted(copies):
            if version < oldest:
                del copies[version]
        if step not in copies:
            self._policy.gather_parameters()
            copies[step] = self._copied(self._tensors())

    @contextlib.contextmanager
    def _weights_of(self, adapter: str, step: int, version: int) -> Iterator[None]:
        """Puts the weights of an older `version` into the policy, which has those of `step`."""
        copies = self._copies[adapter]
        if version < self._oldest:
            raise RunFailed(
                f"step {step + 1}: the batch has tokens of version {version}, and the oldest "
                f"weights that are kept are of version {self._oldest}"
            )
        nearest = _nearest(copies, version)
        assert nearest is not None, "the policy's own version is kept"
        if nearest == step:
            yield
            return
        with self._exchanged(copies[nearest]):
            yield

    @contextlib.contextmanager
    def _exchanged(self, copy: _Copy) -> Iterator[None]:
        self._policy.gather_parameters()
        tensors = self._tensors()
        exchange(tensors, copy)
        try:
            yield
        finally:
            exchange(tensors, copy)

    @contextlib.contextmanager
    def _earlier(self, adapter: str, age: int) -> Iterator[None]:
        """Puts the weights of `age` versions ago into the policy, and keeps what comes of them."""
        policy = self._policy
        with policy.adapters.active(adapter), policy.memory.resident(MemoryPart.PARAMETERS):
            copies = self._copies[adapter]
            version = self._version - age
            if version not in copies:
                policy.gather_parameters()
                nearest = _nearest(copies, version)
                tensors = self._tensors()
                if nearest is not None:
                    tensors = copies[nearest]
                copies[version] = self._copied(tensors)
            with self._exchanged(copies[version]):
                yield


def _nearest(copies: Mapping[int, _Copy], version: int) -> int | None:
    """Returns the oldest copy that is not older than `version`; None if there is none.

    The weights did not change from `version` until that copy was taken.
    """
    not_older = [step for step in copies if step >= version]
    return min(not_older, default=None)


def _lags(sequences: Sequence[TrainingSequence]) -> list[int]:
    """Returns the lags of the sampled tokens but 0, ascending."""
    lags: set[int] = set()
    for sequence in sequences:
        lags.update(sequence.lags[_is_sampled(sequence)].tolist())
    return sorted(lags - {0})


def _of_lag(
    sequences: Sequence[TrainingSequence], lag: int
) -> tuple[list[int], list[TrainingSequence]]:
    """Returns the places of the sequences with tokens of a lag, and these, training them alone."""
    places: list[int] = []
    masked: list[TrainingSequence] = []
    for place, sequence in enumerate(sequences):
        mask = _is_sampled(sequence) & (sequence.lags == lag)
        if mask.any():
            places.append(place)
            masked.append(replace(sequence, loss_mask=mask))
    return places, masked


def _is_sampled(sequence: TrainingSequence) -> BoolArray:
    """Returns where a token is predicted that a policy sampled."""
    is_given = np.isnan(sequence.behavior_logprobs)
    is_sampled: BoolArray = sequence.loss_mask & ~is_given
    return is_sampled
