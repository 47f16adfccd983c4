"""Passes over sequences that a client gives, and the steps that it orders for their gradients.

Consumes: passes, and batches with a given step. Produces: log-probabilities, gradients that stay
until the next step, new weights. Waits for: the other ranks, in collectives.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.config import Config
from slipstream.learner.algorithms.functions import named_loss
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from slipstream.learner.algorithms.token_functions import token_terms
from slipstream.learner.trainer.algorithms.loss import TokenLoss, no_statistics
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.memory import Part, gradient_buffers
from slipstream.learner.trainer.model.model import AdamNumbers, Policy
from slipstream.learner.trainer.model.schedule import forward_backward, forward_logprobs
from slipstream.learner.trainer.model.shares import masked_outputs
from slipstream.learner.trainer.step import TrainedStep
from slipstream.v1 import trainer_pb2 as pb
from torch import Tensor


class Passes:
    """Carries out passes, each once, and the steps of Adam that use up their gradients.

    All methods are collective, and every rank must pass the same messages.
    """

    def __init__(self, policy: Policy, config: Config, load: Callable[[int], object]) -> None:
        """Takes `load`, which loads the checkpoint of a version."""
        self._policy, self._load = policy, load
        self._max_tokens = config.learner.micro_batch_tokens
        # Reports of the passes since the newest step, by id, and those whose gradients are held.
        self._reports: dict[str, pb.PassReport] = {}
        self._accumulated: list[str] = []

    def compute(self, given: pb.Pass) -> pb.PassReport:
        """Returns log-probabilities and loss of a pass, and adds its gradients to those held.

        A pass that was carried out since the newest step is not carried out again. A pass that
        fails adds nothing, and the report names the cause.
        """
        if given.id not in self._reports:
            try:
                self._reports[given.id] = self._computed(given)
            except (UntrainableBatch, ValueError) as error:
                self._reports[given.id] = pb.PassReport(id=given.id, error=str(error))
        return self._reports[given.id]

    def run(self, batch: Batch) -> TrainedStep:
        """Updates the weights with the gradients of the batch's passes, or loads a checkpoint.

        It forgets the passes, which are carried out again unless exactly their gradients are held,
        as after a restart. Raises UntrainableBatch, with unchanged weights, if the gradients are
        not finite.
        """
        started = time.monotonic()
        assert batch.given is not None
        memory = self._policy.memory
        if batch.given.WhichOneof("step") == "load":
            self._forget()
            with memory.resident(Part.PARAMETERS, Part.OPTIMIZER):
                self._load(batch.given.load.step)
                if batch.given.load.without_optimizer:
                    self._policy.forget_moments()
            return TrainedStep({}, time.monotonic() - started, {})
        if self._accumulated != [given.id for given in batch.passes]:
            self._forget()
            for given in batch.passes:
                if error := self.compute(given).error:
                    raise RunFailed(f"pass {given.id} had gradients before, and now: {error}")
        if not self._accumulated:
            self._policy.zero_grad()
        numbers = AdamNumbers.from_pb(batch.given.adam)
        try:
            with memory.resident(Part.PARAMETERS, Part.GRADIENTS):
                norm = self._policy.optimizer_step(numbers.learning_rate, _never, adam=numbers)
        finally:
            self._forget()
        metrics = {"grad_norm": norm, "learning_rate": numbers.learning_rate}
        return TrainedStep(metrics, time.monotonic() - started, {})

    def _forget(self) -> None:
        self._reports.clear()
        self._accumulated.clear()

    def _computed(self, given: pb.Pass) -> pb.PassReport:
        sequences = [self._sequence(place, one) for place, one in enumerate(given.sequences)]
        if not sequences:
            raise ValueError("a pass needs at least one sequence")
        policy, ranks, own = self._policy, self._policy.ranks, _PassLoss(self._policy, given)
        with policy.memory.resident(Part.PARAMETERS, Part.GRADIENTS):
            buffers = list(gradient_buffers(policy.chunks)) if given.backward else []
            held = [buffer.clone() for buffer in buffers] if self._accumulated else []
            if given.backward:
                policy.zero_grad()
            logprobs = masked_outputs(policy, sequences, own.outputs, max_tokens=self._max_tokens)
            total = float(ranks.sum(own.total if ranks.counts else torch.zeros_like(own.total)))
            if given.backward and not math.isfinite(total):
                policy.zero_grad()
            for buffer, before in zip(buffers, held, strict=bool(held)):
                buffer.add_(before)
        if not math.isfinite(total):
            raise UntrainableBatch(f"the loss is {total}")
        if given.backward:
            self._accumulated.append(given.id)
        return pb.PassReport(
            id=given.id,
            logprobs=[found.astype("<f4").tobytes() for found in logprobs],
            metrics={"loss:sum": total},
        )

    def _sequence(self, place: int, given: pb.PassSequence) -> TrainingSequence:
        """Returns a sequence of the pass; raises ValueError if it cannot be trained."""
        policy = self._policy
        tokens, targets = (
            np.frombuffer(data, dtype="<u4").astype(np.int64)
            for data in (given.token_ids, given.targets)
        )
        advantages = np.frombuffer(given.advantages, dtype="<f4")
        behavior = np.frombuffer(given.behavior_logprobs, dtype="<f4")
        lengths = {len(tokens), len(targets), len(advantages), len(behavior) or len(tokens)}
        if len(lengths) != 1 or not len(tokens):
            raise ValueError(f"the arrays of sequence {place} have lengths {sorted(lengths)}")
        if len(tokens) > policy.max_positions:
            raise ValueError(
                f"sequence {place} has {len(tokens)} tokens, the model has positions for "
                f"{policy.max_positions}"
            )
        if (largest := int(max(tokens.max(), targets.max()))) >= policy.vocab_size:
            raise ValueError(
                f"sequence {place} has token {largest}, the vocabulary has {policy.vocab_size}"
            )
        return TrainingSequence(
            token_ids=tokens,
            targets=targets,
            loss_mask=np.ones(len(tokens), dtype=np.bool_),
            behavior_logprobs=behavior if len(behavior) else np.zeros_like(advantages),
            lags=np.zeros(len(tokens), dtype=np.int32),
            advantages=advantages,
        )


def _never() -> None:
    raise AssertionError("only float16, which is refused, computes gradients again")


class _PassLoss:
    """The loss of one pass, summed over this rank's micro batches."""

    def __init__(self, policy: Policy, given: pb.Pass) -> None:
        self._policy, self._backward, self._where = policy, given.backward, f"pass {given.id}"
        self._function = named_loss(given.loss, json.loads(given.loss_args_json or "{}"))
        self._logprobs: dict[int, Tensor] = {}
        self.total = torch.zeros((), dtype=torch.float64)

    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the log-probabilities of each micro batch; accumulates gradients if asked to."""
        policy = self._policy
        if self._backward:
            forward_backward(policy, micro_batches, self._loss, temperature=1.0)
        else:
            found = forward_logprobs(policy, micro_batches, temperature=1.0)
            for place, logprobs in enumerate(found):
                own = micro_batches[place].to(policy.ranks.device)
                self._loss(place, own, logprobs, torch.zeros_like(logprobs))
        return [self._logprobs[place] for place in sorted(self._logprobs)]

    def _loss(self, place: int, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenLoss:
        ranks, mask = self._policy.ranks, batch.loss_mask
        tokens = LossInputs(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            mask=mask,
            is_given=torch.zeros_like(mask),
            lags=batch.lags,
            versions=batch.lags,
            reference_logprobs=None,
            entropy=entropy,
            sequences=SequenceSums(
                batch.sequence_ids, mask, len(batch.indices) + 1, ranks.cp_group
            ),
        )
        losses = torch.where(mask, token_terms(self._function, tokens, self._where).losses, 0.0)
        self._logprobs[place] = logprobs.detach()
        self.total += losses.detach().sum(dtype=torch.float64).cpu()
        # The schedule divides the sum over all ranks by this number over all ranks: 1.
        is_first = place == 0 and ranks.dp_rank == 0 and ranks.cp_rank == 0
        number = torch.tensor(int(is_first), device=losses.device)
        return TokenLoss(losses.sum(), number, no_statistics(losses), losses.detach())
