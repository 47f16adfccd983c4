"""The state of a trainer's models at one moment, to which training can go back."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.checkpoints.stored_model import POLICY, StoredModel
from slipstream.learner.trainer.model.model import (
    MemoryPart,
    parameters,
    torch_optimizers,
    unwrapped,
)
from slipstream.learner.trainer.model.policy import Policy, optimizer_state
from torch import Tensor

ParameterGroup = dict[str, Any]


class HeldState:
    """Weights, buffers and optimizer states of a policy and of models beside it, in host memory.

    Every method is collective. `others` are the models that a checkpoint stores besides the policy.
    A policy with several adapters has more state than this.
    """

    @torch.no_grad()
    def __init__(
        self,
        policy: Policy,
        others: Sequence[StoredModel] = (),
        *,
        version: int = 0,
    ) -> None:
        """Copies the state as it is now, of `version`."""
        self._policy = policy
        self.version = version
        models = self._models(others)
        self._values: list[Tensor] = []
        with self._resident():
            policy.gather_parameters()
            for tensor in _tensors(models):
                value = tensor.detach().to("cpu", copy=True)
                self._values.append(value)
        # Numbers of updates, by which Adam corrects the bias of its moments.
        groups = _parameter_groups(models)
        self._num_updates = [group["step"] for group in groups]
        self._loss_scale: dict[str, Any] | None = None
        if policy.scaler is not None:
            self._loss_scale = policy.scaler.state_dict()

    @torch.no_grad()
    def restore(self, others: Sequence[StoredModel] = ()) -> None:
        """Puts the state into the policy and into `others`, of the same shapes as at the copy.

        Raises ValueError for a different number of tensors.
        """
        policy = self._policy
        models = self._models(others)
        with self._resident():
            policy.gather_parameters()
            tensors = _tensors(models)
            for tensor, value in zip(tensors, self._values, strict=True):
                tensor.copy_(value)
        groups = _parameter_groups(models)
        for group, num_updates in zip(groups, self._num_updates, strict=True):
            group["step"] = num_updates
        if self._loss_scale is not None:
            policy.scaler.load_state_dict(self._loss_scale)

    def _resident(self) -> AbstractContextManager[None]:
        """Has weights and optimizer of the policy on the device for the time of a block."""
        memory = self._policy.memory
        return memory.resident(MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER)

    def _models(
        self,
        others: Sequence[StoredModel],
    ) -> list[StoredModel]:
        """Returns the policy and `others`, whose optimizers have moments from now on."""
        policy = self._policy
        stored = StoredModel(
            name=POLICY,
            chunks=policy.chunks,
            optimizer=policy.optimizer,
        )
        models = [stored, *others]
        with self._resident():
            for optimizer in _optimizers(models):
                _make_moments(optimizer)
        for group in _parameter_groups(models):
            group.setdefault("step", 0)
        return models


def _make_moments(optimizer: Megatron) -> None:
    """Makes moments of 0 where no update has made any."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer or part.optimizer.state:
            continue
        part.init_state_fn(part.optimizer, part.config)


def _optimizers(models: Sequence[StoredModel]) -> list[Megatron]:
    optimizers = [model.optimizer for model in models]
    return [optimizer for optimizer in optimizers if optimizer is not None]


def _parameter_groups(
    models: Sequence[StoredModel],
) -> list[ParameterGroup]:
    groups: list[ParameterGroup] = []
    for optimizer in _optimizers(models):
        for part in torch_optimizers(optimizer):
            groups.extend(part.param_groups)
    return groups


def _tensors(models: Sequence[StoredModel]) -> Iterator[Tensor]:
    for model in models:
        # Chunks that are lent have the model's values inside the block.
        with model.in_force():
            yield from parameters(model.chunks)
            for chunk in model.chunks:
                yield from unwrapped(chunk).buffers()
            if model.optimizer is not None:
                yield from optimizer_state(model.optimizer, model.chunks)
