"""Passes over sequences that a client gives, and the steps that it orders for their gradients.

Consumes: passes, and batches with a given step. Produces: log-probabilities, gradients that stay
until the next step, new weights. Waits for: the other ranks, in collectives.

With `lora.adapters` each pass and step is of one adapter, and changes nothing of the others.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from slipstream.core.errors import UntrainableBatch
from slipstream.learner.algorithms.functions import named_loss
from slipstream.learner.algorithms.inputs import LossInputs, SequenceSums
from slipstream.learner.algorithms.losses import token_terms
from slipstream.learner.trainer.algorithms.loss import TokenLoss
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch, TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel, stored_adapter
from slipstream.learner.trainer.model.model import Part, gradient_buffers, unwrapped
from slipstream.learner.trainer.model.policy import Policy, draw_adapters
from slipstream.learner.trainer.model.schedule import (
    forward_backward,
    forward_logprobs,
    masked_outputs,
    update_weights,
)
from slipstream.learner.trainer.step import TrainedStep
from slipstream.protocol.codec import passes_digest
from slipstream.v1 import trainer_pb2 as pb
from torch import Tensor


@dataclass
class _Held:
    """What is held since the newest step, of the policy or of one of its adapters."""

    # Reports of the passes whose gradients are held, by id, in their order.
    reports: dict[str, pb.PassReport] = field(default_factory=dict)
    # The gradients while those of another adapter are in the model's buffers.
    gradients: list[Tensor] = field(default_factory=list)


class Passes:
    """Carries out passes, each once, and the steps of Adam that use up their gradients.

    All methods are collective, and every rank must pass the same messages.
    """

    def __init__(
        self, policy: Policy, load: Callable[[int, Sequence[StoredModel]], object]
    ) -> None:
        """Takes `load`, which loads models of a version's checkpoint, or all if none is given."""
        self._policy, self._load = policy, load
        # By the name of an adapter, "" for the policy; the one whose gradients are in the buffers.
        self._of: defaultdict[str, _Held] = defaultdict(_Held)
        self._in_buffers = ""

    def compute(self, given: pb.Pass) -> pb.PassReport:
        """Returns log-probabilities and loss of a pass, and adds its gradients to those held.

        A pass whose gradients are held is not carried out again. A pass that fails adds nothing,
        and the report names the cause.
        """
        with self._held(given.adapter) as held:
            if given.id in held.reports:
                return held.reports[given.id]
            try:
                report = self._computed(given, held)
            except (UntrainableBatch, ValueError) as error:
                return pb.PassReport(id=given.id, error=str(error))
            if given.backward:
                held.reports[given.id] = report
            return report

    def held(self) -> list[bytes]:
        """Returns, for each adapter with gradients, `passes_digest` of the passes they are of."""
        return [passes_digest(name, own.reports) for name, own in self._of.items() if own.reports]

    def run(self, batch: Batch) -> TrainedStep:
        """Updates the weights with the gradients of the batch's passes, or as a client asks else.

        An update forgets the passes, which are carried out again unless exactly their gradients
        are held, as after a restart. Raises UntrainableBatch, with unchanged weights, if the
        gradients, or values that servers are to get, are not finite.
        """
        started = time.monotonic()
        given = batch.given
        assert given is not None
        memory = self._policy.memory
        metrics: dict[str, float] = {}
        with self._held(given.adapter) as held, memory.resident(Part.PARAMETERS):
            match given.WhichOneof("step"):
                case "adam":
                    if list(held.reports) != [one.id for one in batch.passes]:
                        held.reports.clear()
                        for one in batch.passes:
                            if error := self.compute(one).error:
                                raise UntrainableBatch(
                                    f"pass {one.id} had gradients, and now: {error}"
                                )
                    if not held.reports:
                        self._policy.zero_grad()
                    rate = given.adam.learning_rate
                    try:
                        with memory.resident(Part.GRADIENTS):
                            assert self._policy.scaler is None, "float16 would compute again"
                            norm = update_weights(self._policy, rate, list, adam=given.adam)
                    finally:
                        held.reports.clear()
                    metrics = {"grad_norm": norm, "learning_rate": rate}
                case "load":
                    held.reports.clear()
                    with memory.resident(Part.OPTIMIZER):
                        models, name = [], given.load.adapter
                        if name:
                            optimizer, own = self._policy.optimizer, given.adapter.name
                            models = [stored_adapter(self._policy, name, own, optimizer)]
                        self._load(given.load.step, models)
                        if given.load.without_optimizer:
                            self._policy.forget_moments()
                case "begin":
                    held.reports.clear()
                    with memory.resident(Part.OPTIMIZER):
                        self._policy.gather_parameters()
                        for chunk in self._policy.chunks:
                            draw_adapters(
                                unwrapped(chunk),
                                self._policy.ranks,
                                seed=given.begin.seed,
                                rank=given.adapter.rank,
                                targets=given.begin.targets,
                            )
                        self._policy.optimizer.reload_model_params()
                        self._policy.forget_moments()
                        self._serve(given.adapter)
                case _:
                    self._serve(given.adapter)
        self._policy.adapters.changed.add(given.adapter.name)
        return TrainedStep(metrics, time.monotonic() - started, {})

    @contextmanager
    def _held(self, adapter: pb.Adapter) -> Iterator[_Held]:
        """Puts an adapter and its gradients into the model inside the context."""
        name = adapter.name
        held, other = self._of[name], self._of[self._in_buffers]
        if name != self._in_buffers:
            with self._policy.memory.resident(Part.GRADIENTS):
                buffers = list(gradient_buffers(self._policy.chunks))
                other.gradients = [one.clone() for one in buffers] if other.reports else []
                for buffer, gradient in zip(buffers, held.gradients, strict=bool(held.gradients)):
                    buffer.copy_(gradient)
            self._in_buffers, held.gradients = name, []
        if not name:
            yield held
            return
        with self._policy.adapters.in_use(name, rank=adapter.rank, alpha=adapter.alpha):
            yield held

    def _serve(self, adapter: pb.Adapter) -> None:
        scale, sum_ = adapter.alpha / adapter.rank, self._policy.ranks.sum
        self._policy.adapters.serve(sum_, scale=scale)

    def _computed(self, given: pb.Pass, held: _Held) -> pb.PassReport:
        sequences = [self._sequence(place, one) for place, one in enumerate(given.sequences)]
        if not sequences:
            raise ValueError("a pass needs at least one sequence")
        policy, ranks, own = self._policy, self._policy.ranks, _PassLoss(self._policy, given)
        with policy.memory.resident(Part.PARAMETERS, Part.GRADIENTS):
            buffers = list(gradient_buffers(policy.chunks)) if given.backward else []
            before = [buffer.clone() for buffer in buffers] if held.reports else []
            if given.backward:
                policy.zero_grad()
            try:
                logprobs = masked_outputs(policy, sequences, own.outputs)
                sum_ = own.total.cpu()
                total = float(ranks.sum(sum_ if ranks.counts else torch.zeros_like(sum_)))
                if not math.isfinite(total):
                    raise UntrainableBatch(f"the loss is {total}")
            except (UntrainableBatch, ValueError):
                if given.backward:
                    policy.zero_grad()
                raise
            finally:
                for buffer, gradient in zip(buffers, before, strict=bool(before)):
                    buffer.add_(gradient)
        return pb.PassReport(
            id=given.id,
            logprobs=[found.astype("<f4").tobytes() for found in logprobs],
            metrics={"loss:sum": total},
        )

    def _sequence(self, place: int, given: pb.PassSequence) -> TrainingSequence:
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


class _PassLoss:
    def __init__(self, policy: Policy, given: pb.Pass) -> None:
        self._policy, self._backward, self._where = policy, given.backward, f"pass {given.id}"
        self._function = named_loss(given.loss, json.loads(given.loss_args_json or "{}"))
        self._logprobs: dict[int, Tensor] = {}
        # On the device: a micro batch must not wait for the one before it.
        self.total = torch.zeros((), dtype=torch.float64, device=policy.ranks.device)

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
        # Other tokens of a sequence are its prompt's, whose behavior log-probabilities say nothing.
        trained = mask & (batch.advantages != 0.0)
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
                batch.sequence_ids, trained, len(batch.indices) + 1, ranks.cp_group
            ),
        )
        losses = torch.where(mask, token_terms(self._function, tokens, self._where).losses, 0.0)
        self._logprobs[place] = logprobs.detach()
        self.total += losses.detach().sum(dtype=torch.float64)
        # The schedule divides the sum over all ranks by this number over all ranks: 1.
        is_first = place == 0 and ranks.dp_rank == 0 and ranks.cp_rank == 0
        number = losses.new_full((), int(is_first), dtype=torch.int)
        return TokenLoss(losses.sum(), number, losses.new_zeros(0), losses.detach())
