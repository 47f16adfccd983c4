"""The reference model and the critic: their estimates for a batch, and their updates after it.

The reference is either a frozen model, or the policy without its adapters, which needs no
additional memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from slipstream.core.configuration.roles import (
    critic_config,
    named,
    reference_config,
    reference_is_policy,
)
from slipstream.core.settings.config import Config
from slipstream.core.types import ReferenceLogprobs
from slipstream.extensions.other_models.trainer.critic import Critic
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.algorithms.sequences import ModelEstimates
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.model.memory import Part
from slipstream.learner.trainer.model.model import ParallelModel, Policy, TrainedModel
from slipstream.learner.trainer.model.schedule import forward_logprobs
from slipstream.learner.trainer.model.shares import batch_outputs
from slipstream.learner.trainer.opening import load_frozen
from slipstream.learner.trainer.part import StepPart
from slipstream.learner.trainer.ranks.parallel import Ranks
from slipstream.learner.trainer.stage_times import StageTimes
from slipstream.learner.trainer.weights.export import hf_tensors
from torch import Tensor


@dataclass(frozen=True)
class Roles(StepPart):
    """The models that the algorithm needs besides the policy."""

    reference: Reference | PolicyWithoutAdapters | None = None
    refresh_every_steps: int = 0
    critic: Critic | None = None
    # Whether a server answers for the reference: trajectories then carry its log-probabilities.
    is_served: bool = False

    def estimates(self, batch: Batch, stages: StageTimes) -> list[ModelEstimates]:
        """Returns the estimates for each trajectory; the same on every rank.

        If `is_served`, the batch must have passed `check_references`.
        """
        with stages.measure("estimates"):
            return self._estimates(batch)

    def _estimates(self, batch: Batch) -> list[ModelEstimates]:
        nothing = [None] * len(batch.trajectories)
        known: Sequence[ReferenceLogprobs | None] = nothing
        if self.is_served:
            known = [trajectory.reference for trajectory in batch.trajectories]
        elif self.reference is not None:
            known = self.reference.logprobs(batch)
        values = self.critic.values(batch) if self.critic is not None else nothing
        return [ModelEstimates(a, values=b) for a, b in zip(known, values, strict=True)]

    def models(self) -> dict[str, ParallelModel]:
        """Returns the critic, and a reference that is a model apart from the policy, by name."""
        found: dict[str, ParallelModel] = {}
        if isinstance(self.reference, Reference):
            found["reference"] = self.reference.model
        if self.critic is not None:
            found["critic"] = self.critic.model
        return found

    def stored_models(self) -> list[StoredModel]:
        """Returns the models that checkpoints must store: the critic and a refreshed reference."""
        found = []
        for name, model in self.models().items():
            optimizer = model.optimizer if isinstance(model, TrainedModel) else None
            if optimizer is not None or self.refresh_every_steps:
                found.append(StoredModel(name, model.chunks, optimizer, model.ranks.in_force))
        return found

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        stages: StageTimes,
    ) -> dict[str, float]:
        """Trains the critic."""
        if self.critic is None:
            return {}
        with stages.measure("critic"):
            return self.critic.train(sequences, mini_batches)

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Copies the policy into the reference if a refresh is due."""
        every = self.refresh_every_steps
        if isinstance(self.reference, Reference) and every and (batch.step + 1) % every == 0:
            self.reference.refresh(policy)
        return {}


def open_roles(config: Config, policy: Policy) -> Roles:
    """Loads the models that `config` asks for, on the policy's ranks; collective.

    Raises ConfigError for a model or a setting that cannot work.
    """
    of_reference, of_critic = reference_config(config), critic_config(config)
    reference: Reference | PolicyWithoutAdapters | None = None
    critic = None
    if reference_is_policy(config):
        reference = PolicyWithoutAdapters(policy, config)
    elif of_reference is not None:
        with named(config, "reference"):
            reference = Reference(of_reference, policy.ranks)
    if of_critic is not None:
        with named(config, "critic"):
            critic = Critic(of_critic, policy.ranks)
    every = config.reference.refresh_every_steps if config.reference is not None else 0
    is_served = config.reference is not None and config.reference.server is not None
    return Roles(reference, every, critic, is_served)


class Reference:
    """A frozen reference model; every method is collective and itself puts its layout in force."""

    def __init__(self, settings: Config, ranks: Ranks) -> None:
        """Loads the model; `settings` must come from `reference_config`."""
        self._settings = settings
        self._ranks = ranks.placed(settings.learner.parallel)
        with self._ranks.in_force():
            self.model = load_frozen(settings, self._ranks)

    def logprobs(self, batch: Batch) -> list[ReferenceLogprobs]:
        """Returns the result of `reference_logprobs` at the sampling temperature."""
        with self._ranks.in_force():
            return reference_logprobs(self.model, batch, self._settings)

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        """Copies the policy's current weights into the reference; the two layouts may differ.

        Weights are copied tensor by tensor. Tensors that Megatron fuses are joined as soon as all
        of them have arrived, so that no rank ever holds the whole model. Each tensor is sent to
        every rank once.
        """
        with self.model.memory.resident(Part.PARAMETERS):
            self._refresh(policy)

    def _refresh(self, policy: Policy) -> None:
        with self._ranks.in_force():
            # The tasks have the names of the policy's files; the model's own folder may differ.
            found = policy.bridge.get_conversion_tasks(self.model.chunks)
        tasks = [task for task in found if task is not None and task.megatron_module is not None]
        waiting: dict[str, Tensor] = {}
        # One tensor may hold the matrices of all experts, each of which is a parameter.
        needed_by: dict[str, dict[str, Megatron]] = {}
        for task in tasks:
            for name in _sources(task):
                needed_by.setdefault(name, {})[task.global_param_name] = task
        for name, tensor in hf_tensors(policy, self.model.dtype):
            if name not in needed_by:
                continue
            waiting[name] = tensor
            for task in list(needed_by[name].values()):
                if any(source not in waiting for source in _sources(task)):
                    continue
                with self._ranks.in_force():
                    # This is how Bridge loads a folder.
                    found = policy.bridge._model_bridge.maybe_modify_loaded_hf_weight(
                        task.mapping.hf_param, waiting
                    )
                    part = task.mapping.hf_to_megatron(found, task.megatron_module)
                    if part is not None:
                        task.param_weight.copy_(part)
                for source in _sources(task):
                    del needed_by[source][task.global_param_name]
                    if not needed_by[source]:
                        del needed_by[source], waiting[source]
        missing = sorted(needed_by.keys() - waiting.keys())
        assert not missing, f"the policy has no {', '.join(missing)}"
        with self._ranks.in_force():
            self.model.bridge._model_bridge._broadcast_shared_embeddings(self.model.chunks)


def reference_logprobs(
    model: ParallelModel, batch: Batch, settings: Config
) -> list[ReferenceLogprobs]:
    """Returns, for each trajectory, the log-probabilities of sampled tokens and of top-k tokens.

    The top-k tokens are the `settings.reference.top_k` most likely tokens at each sampled token's
    position, or none without `settings.reference`. The layout of `model` must be in force.
    Collective.
    """
    top_k = settings.reference.top_k if settings.reference is not None else 0
    forward = functools.partial(
        forward_logprobs, model, temperature=settings.sampling.temperature, top_k=top_k
    )
    found = batch_outputs(
        model,
        batch,
        forward,
        max_tokens=settings.learner.micro_batch_tokens,
        width=1 + 2 * top_k if top_k else 0,
    )
    columns = [values.reshape(len(values), -1) for values in found]
    return [
        ReferenceLogprobs(
            values[:, 0], values[:, 1 : 1 + top_k].astype(np.uint32), values[:, 1 + top_k :]
        )
        for values in columns
    ]


def _sources(task: Megatron) -> Sequence[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


class PolicyWithoutAdapters:
    """The policy with its adapters switched off, used as the reference."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self.model, self._config = policy, config

    def logprobs(self, batch: Batch) -> list[ReferenceLogprobs]:
        """Returns the log-probabilities as `Reference.logprobs` does; collective."""
        policy, sharing = self.model, self.model.sharing
        noted = None if sharing is None else sharing.saved
        with without_adapters(policy.chunks):
            found = reference_logprobs(policy, batch, self._config)
        if sharing is not None and noted is not None:
            # The work that sharing saves in this pass does not count for a training step.
            sharing.saved = noted
        return found


@contextmanager
def without_adapters(chunks: Sequence[Megatron]) -> Iterator[None]:
    """Switches every adapter of `chunks` off inside the context."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from slipstream.learner.trainer.adapters.expert_adapters import ExpertAdapter

    modules = [module for chunk in chunks for module in chunk.modules()]
    adapted = [module for module in modules if isinstance(module, AdapterWrapper)]
    of_experts = [module for module in modules if isinstance(module, ExpertAdapter)]
    for module in adapted:
        module.disable_adapter_layers()
    for adapter in of_experts:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapter_layers()
        for adapter in of_experts:
            adapter.is_enabled = True
