"""Training of recorded batches by one set of settings: one of several lines of one policy."""

from dataclasses import replace
from functools import partial

from slipstream.core.settings.config import Config
from slipstream.core.types import PolicyVersion
from slipstream.learner.trainer.batches.batch import (
    Contents,
    read_stored,
)
from slipstream.learner.trainer.checkpoints.checkpoint import Checkpointer
from slipstream.learner.trainer.checkpoints.stored_model import (
    StoredModel,
    stored_policy,
)
from slipstream.learner.trainer.held_state import HeldState
from slipstream.learner.trainer.model.model import MemoryPart
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.opening import load_start
from slipstream.learner.trainer.parts import step_parts
from slipstream.learner.trainer.passes import Passes
from slipstream.learner.trainer.step import (
    TrainedStep,
    TrainingStep,
)


class TrainingLine:
    """Trains the policy by the settings of `config`; every method is collective.

    The policy may be of other settings that enter only when it is trained. It holds the state of
    one line at a time: `restore` changes it. `others` are the models besides
    the policy that checkpoints of the line store.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        """Loads the models besides the policy; raises ConfigError like `step_parts`."""
        self._policy = policy
        self._config = config
        self._parts = step_parts(config, policy)
        self._step = TrainingStep(policy, config, self._parts)
        # The version that the policy holds.
        self._version = 0
        self.others: list[StoredModel] = []
        for part in self._parts:
            self.others.extend(part.stored_models())
        published = stored_policy(policy)
        stored = [*published, *self.others]
        self._checkpointer = Checkpointer(
            config,
            policy.ranks,
            stored,
            adapters=policy.adapters.sizes,
        )
        # Without optimizers a checkpoint of either kind, distributed or plain, can be read.
        weights = [replace(model, optimizer=None) for model in stored]
        self._weights_reader = Checkpointer(
            config,
            policy.ranks,
            weights,
        )
        self._policy_weights = weights[: len(published)]
        start = partial(load_start, policy, config)
        self._passes = Passes(policy, self._checkpointer.load, start)

    def load(self, version: int) -> None:
        """Loads the checkpoint of `version`; raises like `Checkpointer.load`."""
        memory = self._policy.memory
        with memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            self._checkpointer.load(version)
        self._starts_from(version)

    def load_weights(self, version: int) -> None:
        """Loads only the policy's weights of a checkpoint; raises like `Checkpointer.load`.

        The optimizer keeps its own copies: training must not go on before `restore`.
        """
        memory = self._policy.memory
        with memory.resident(MemoryPart.PARAMETERS):
            self._weights_reader.load(version, self._policy_weights)

    def hold(self) -> HeldState:
        """Returns the state of this line, which the policy holds now."""
        return HeldState(self._policy, self.others, version=self._version)

    def restore(self, state: HeldState) -> None:
        """Goes on from a state of this line, or of another one that stores the same models."""
        state.restore(self.others)
        self._starts_from(state.version)

    def _starts_from(self, version: int) -> None:
        self._version = version
        for part in self._parts:
            part.holds(PolicyVersion(0, version))

    def train(self, contents: Contents) -> TrainedStep:
        """Trains a recorded batch as the trainer does; raises like `TrainingStep.run`."""
        settings = self._config.learner
        # The optimizer reads both at each update, and the policy may be of another line's settings.
        optimizer = self._policy.optimizer.config
        optimizer.weight_decay = settings.weight_decay
        optimizer.clip_grad = settings.grad_clip
        batch = read_stored(contents, self._step.share)
        step = self._step if batch.given is None else self._passes
        trained = step.run(batch)
        self._version = batch.step + 1
        return trained
