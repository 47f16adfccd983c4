"""The reference model and the critic: their estimates for a batch, and their updates after it."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.configuration.roles import (
    critic_config,
    named,
    reference_config,
    reference_is_policy,
)
from slipstream.core.reference_logprobs import ReferenceLogprobs
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.algorithms.sequences import ModelEstimates
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.offload import HostMemory
from slipstream.learner.trainer.roles.critic import Critic
from slipstream.learner.trainer.roles.reference import PolicyWithoutAdapters, Reference


@dataclass(frozen=True)
class Roles:
    """The models that the algorithm needs; every method is collective."""

    reference: Reference | PolicyWithoutAdapters | None = None
    refresh_every_steps: int = 0
    critic: Critic | None = None
    # Whether a server answers for the reference: trajectories then carry its log-probabilities.
    is_served: bool = False

    def estimates(self, batch: Batch) -> list[ModelEstimates]:
        """Returns the estimates for each trajectory; the same on every rank.

        If `is_served`, `check_references` must have passed the batch.
        """
        nothing = [None] * len(batch.trajectories)
        known: Sequence[ReferenceLogprobs | None] = nothing
        if self.is_served:
            known = [trajectory.reference for trajectory in batch.trajectories]
        elif self.reference is not None:
            known = self.reference.logprobs(batch)
        values = self.critic.values(batch) if self.critic is not None else nothing
        return [ModelEstimates(a, values=b) for a, b in zip(known, values, strict=True)]

    def memories(self) -> list[HostMemory]:
        """Returns the memories of the models in use, without the policy's."""
        roles = (self.reference, self.critic)
        return [
            role.model.memory
            for role in roles
            if role is not None and not isinstance(role, PolicyWithoutAdapters)
        ]

    def stored_models(self) -> list[StoredModel]:
        """Returns the other models that change in training, for checkpoints."""
        found = []
        if isinstance(self.reference, Reference) and self.refresh_every_steps:
            model = self.reference.model
            found.append(StoredModel("reference", model.chunks, None, model.ranks.in_force))
        if self.critic is not None:
            trained = self.critic.model
            found.append(
                StoredModel("critic", trained.chunks, trained.optimizer, trained.ranks.in_force)
            )
        return found

    def follow(self, policy: Policy, version_step: int) -> None:
        """Refreshes the reference if due, after the policy became version `version_step`."""
        every = self.refresh_every_steps
        if isinstance(self.reference, Reference) and every and version_step % every == 0:
            self.reference.refresh(policy)


NO_ROLES = Roles()


def open_roles(config: Config, policy: Policy) -> Roles:
    """Loads the models that `config` asks for, in the policy's ranks; collective.

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
