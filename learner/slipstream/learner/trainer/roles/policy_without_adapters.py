"""The policy without its adapters, which is a reference model that takes no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slipstream.core.reference_logprobs import ReferenceLogprobs
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.model import ParallelModel, Policy
from slipstream.learner.trainer.roles.reference import reference_logprobs
from slipstream.learner.trainer.untyped import Megatron


class PolicyWithoutAdapters:
    """The policy with its adapters switched off, in place of a `Reference`."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy, self._config = policy, config

    @property
    def model(self) -> ParallelModel:
        """The policy."""
        return self._policy

    def logprobs(self, batch: Batch) -> list[ReferenceLogprobs]:
        """Returns what `Reference.logprobs` would; collective."""
        policy, sharing = self._policy, self._policy.sharing
        noted = None if sharing is None else sharing.saved
        with without_adapters(policy.chunks):
            found = reference_logprobs(policy, batch, self._config)
        if sharing is not None and noted is not None:
            # What this pass shares belongs to no training step.
            sharing.saved = noted
        return found


@contextmanager
def without_adapters(chunks: Sequence[Megatron]) -> Iterator[None]:
    """Gives forward passes in which every adapter of `chunks` is off."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from slipstream.learner.trainer.adapters.expert_adapters import adapters_of

    adapted = [m for chunk in chunks for m in chunk.modules() if isinstance(m, AdapterWrapper)]
    of_experts = [*adapters_of(list(chunks))]
    assert adapted or of_experts, "the policy has no adapters to switch off"
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
