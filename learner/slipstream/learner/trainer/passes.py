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
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.learner.algorithms.functions import named_loss
from slipstream.learner.algorithms.inputs import LossInputs, RecordedSums, SequenceSums
from slipstream.learner.algorithms.losses import token_terms
from slipstream.learner.trainer.algorithms.loss import TokenLoss
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch, TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel, stored_adapter
from slipstream.learner.trainer.model.model import MemoryPart, gradient_buffers, unwrapped
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

# Most characters of a cause that a client is told.
_MAX_CAUSE = 2048


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
        self,
        policy: Policy,
        load: Callable[[int, Sequence[StoredModel]], object],
        load_start: Callable[[], object],
    ) -> None:
        """Takes two functions that load weights.

        `load` loads models of a version's checkpoint, or all if none is given; `load_start` the
        weights with which the run began, but for the optimizer's copies and moments.
        """
        self._policy = policy
        self._load = load
        self._load_start = load_start
        # By the name of an adapter, "" for the policy.
        self._held_of: defaultdict[str, _Held] = defaultdict(_Held)
        # The adapter whose gradients are in the buffers.
        self._in_buffers = ""

    def compute(self, order: pb.Pass) -> pb.PassReport:
        """Returns log-probabilities and loss of a pass, and adds its gradients to those held.

        A pass whose gradients are held is not carried out again. A pass that fails adds nothing,
        and the report names the cause: whatever its loss raises, on whichever rank, is its failure
        and no one else's.
        """
        with self._held(order.adapter) as pending:
            if order.id in pending.reports:
                return pending.reports[order.id]
            try:
                report = self._computed(order, pending)
            except (UntrainableBatch, ValueError) as error:
                return pb.PassReport(id=order.id, error=str(error)[:_MAX_CAUSE])
            if order.backward:
                pending.reports[order.id] = report
            return report

    def held(self) -> list[bytes]:
        """Returns, for each adapter with gradients, `passes_digest` of the passes they are of."""
        return [
            passes_digest(name, pending.reports)
            for name, pending in self._held_of.items()
            if pending.reports
        ]

    def run(self, batch: Batch) -> TrainedStep:
        """Updates the weights with the gradients of the batch's passes, or as a client asks else.

        An update forgets the passes, which are carried out again unless exactly their gradients
        are held, as after a restart. Raises UntrainableBatch, with unchanged weights, if the
        gradients, or values that servers are to get, are not finite.
        """
        started = time.monotonic()
        step = batch.given
        assert step is not None
        memory = self._policy.memory
        metrics: dict[str, float] = {}
        with self._held(step.adapter) as pending, memory.resident(MemoryPart.PARAMETERS):
            match step.WhichOneof("step"):
                case "adam":
                    if list(pending.reports) != [order.id for order in batch.passes]:
                        pending.reports.clear()
                        for order in batch.passes:
                            if error := self.compute(order).error:
                                raise UntrainableBatch(
                                    f"pass {order.id} had gradients, and now: {error}"
                                )
                    if not pending.reports:
                        self._policy.zero_grad()
                    rate = step.adam.learning_rate
                    try:
                        with memory.resident(MemoryPart.GRADIENTS):
                            assert self._policy.scaler is None, "float16 would compute again"
                            norm = update_weights(self._policy, rate, list, adam=step.adam)
                    finally:
                        pending.reports.clear()
                    metrics = {"grad_norm": norm, "learning_rate": rate}
                case "load":
                    pending.reports.clear()
                    with memory.resident(MemoryPart.OPTIMIZER):
                        models = []
                        if step.load.adapter:
                            stored = stored_adapter(
                                self._policy,
                                step.load.adapter,
                                step.adapter.name,
                                self._policy.optimizer,
                            )
                            models = [stored]
                        self._load(step.load.step, models)
                        if step.load.without_optimizer:
                            self._policy.forget_moments()
                case "begin":
                    pending.reports.clear()
                    with memory.resident(MemoryPart.OPTIMIZER):
                        self._policy.gather_parameters()
                        if step.adapter.name:
                            self._draw(step)
                        else:
                            self._load_start()
                        self._policy.optimizer.reload_model_params()
                        self._policy.forget_moments()
                        if step.adapter.name:
                            self._serve(step.adapter)
                case _:
                    self._serve(step.adapter)
        self._policy.adapters.changed.add(step.adapter.name)
        return TrainedStep(metrics, time.monotonic() - started, {})

    @contextmanager
    def _held(self, adapter: pb.Adapter) -> Iterator[_Held]:
        """Puts an adapter and its gradients into the model inside the context."""
        name = adapter.name
        pending = self._held_of[name]
        if name != self._in_buffers:
            previous = self._held_of[self._in_buffers]
            with self._policy.memory.resident(MemoryPart.GRADIENTS):
                buffers = list(gradient_buffers(self._policy.chunks))
                previous.gradients = []
                if previous.reports:
                    previous.gradients = [buffer.clone() for buffer in buffers]
                for buffer, gradient in zip(
                    buffers, pending.gradients, strict=bool(pending.gradients)
                ):
                    buffer.copy_(gradient)
            self._in_buffers = name
            pending.gradients = []
        if not name:
            yield pending
            return
        with self._policy.adapters.in_use(name, rank=adapter.rank, alpha=adapter.alpha):
            yield pending

    def _draw(self, step: pb.GivenStep) -> None:
        for chunk in self._policy.chunks:
            draw_adapters(
                unwrapped(chunk),
                self._policy.ranks,
                seed=step.begin.seed,
                rank=step.adapter.rank,
                targets=step.begin.targets,
            )

    def _serve(self, adapter: pb.Adapter) -> None:
        self._policy.adapters.serve(self._policy.ranks.sum, scale=adapter.alpha / adapter.rank)

    def _computed(self, order: pb.Pass, pending: _Held) -> pb.PassReport:
        sequences = [
            self._sequence(place, message) for place, message in enumerate(order.sequences)
        ]
        if not sequences:
            raise ValueError("a pass needs at least one sequence")
        policy = self._policy
        ranks = policy.ranks
        loss = _PassLoss(policy, order)
        with policy.memory.resident(MemoryPart.PARAMETERS, MemoryPart.GRADIENTS):
            buffers = list(gradient_buffers(policy.chunks)) if order.backward else []
            earlier_gradients = [buffer.clone() for buffer in buffers] if pending.reports else []
            if order.backward:
                policy.zero_grad()
            try:
                logprobs = masked_outputs(policy, sequences, loss.outputs)
                # A loss may fail where a rank's own tokens are, and nowhere else.
                failures = ranks.gather_bytes(loss.failure.encode())
                if failure := next(filter(None, failures), b""):
                    raise UntrainableBatch(failure.decode())
                rank_total = loss.total.cpu()
                summed = ranks.sum(rank_total if ranks.counts else torch.zeros_like(rank_total))
                total = float(summed)
                if not math.isfinite(total):
                    raise UntrainableBatch(f"the loss is {total}")
            except (UntrainableBatch, ValueError):
                if order.backward:
                    policy.zero_grad()
                raise
            finally:
                has_earlier = bool(earlier_gradients)
                for buffer, gradient in zip(buffers, earlier_gradients, strict=has_earlier):
                    buffer.add_(gradient)
        return pb.PassReport(
            id=order.id,
            logprobs=[values.astype("<f4").tobytes() for values in logprobs],
            metrics={"loss:sum": total},
        )

    def _sequence(self, place: int, sequence: pb.PassSequence) -> TrainingSequence:
        policy = self._policy
        tokens = np.frombuffer(sequence.token_ids, dtype="<u4").astype(np.int64)
        targets = np.frombuffer(sequence.targets, dtype="<u4").astype(np.int64)
        advantages = np.frombuffer(sequence.advantages, dtype="<f4")
        behavior = np.frombuffer(sequence.behavior_logprobs, dtype="<f4")
        lengths = {len(tokens), len(targets), len(advantages)}
        lengths |= {len(array) for array in (behavior, sequence.ratio_mask) if len(array)}
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
        # Tokens without an advantage are mostly the prompt's, of which no ratio says anything.
        ratio_mask = advantages != 0.0
        if sequence.ratio_mask:
            ratio_mask = np.frombuffer(sequence.ratio_mask, dtype=np.bool_)
        return TrainingSequence(
            token_ids=tokens,
            targets=targets,
            loss_mask=np.ones(len(tokens), dtype=np.bool_),
            behavior_logprobs=behavior if len(behavior) else np.zeros_like(advantages),
            lags=np.zeros(len(tokens), dtype=np.int32),
            advantages=advantages,
            ratio_mask=ratio_mask,
        )


class _PassLoss:
    """The loss of a pass on this rank, and what came of it."""

    def __init__(self, policy: Policy, order: pb.Pass) -> None:
        self._policy = policy
        self._backward = order.backward
        self._where = f"pass {order.id}"
        self._function = named_loss(order.loss, json.loads(order.loss_args_json or "{}"))
        # Why the loss could not be computed here; empty: it was.
        self.failure = ""
        self._logprobs: dict[int, Tensor] = {}
        # On the device: a micro batch must not wait for the one before it.
        self.total = torch.zeros((), dtype=torch.float64, device=policy.ranks.device)

    def outputs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the log-probabilities of each micro batch; accumulates gradients if asked to."""
        policy = self._policy
        if self._backward:
            forward_backward(policy, micro_batches, self._loss, temperature=1.0)
        else:
            outputs = forward_logprobs(policy, micro_batches, temperature=1.0)
            for place, logprobs in enumerate(outputs):
                batch = micro_batches[place].to(policy.ranks.device)
                self._loss(place, batch, logprobs, torch.zeros_like(logprobs))
        return [self._logprobs[place] for place in sorted(self._logprobs)]

    def _loss(self, place: int, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> TokenLoss:
        ranks = self._policy.ranks
        losses = torch.where(batch.loss_mask, self._token_losses(batch, logprobs, entropy), 0.0)
        self._logprobs[place] = logprobs.detach()
        self.total += losses.detach().sum(dtype=torch.float64)
        # The schedule divides the sum over all ranks by this number over all ranks: 1.
        is_first = place == 0 and ranks.dp_rank == 0 and ranks.cp_rank == 0
        number = losses.new_full((), int(is_first), dtype=torch.int)
        return TokenLoss(losses.sum(), number, losses.new_zeros(0), losses.detach())

    def _token_losses(self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """Returns the loss of each token, or zeros, with `failure` set, if the function fails.

        The schedule goes on behind a failure: other ranks wait in its collectives.
        """
        mask = batch.loss_mask
        assert batch.ratio_mask is not None
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
                batch.sequence_ids,
                mask & batch.ratio_mask,
                len(batch.indices) + 1,
                self._policy.ranks.cp_group,
            ),
            batch=RecordedSums(mask, ()),
        )
        try:
            return token_terms(self._function, tokens, self._where).losses
        except RunFailed as failure:
            self.failure = self.failure or str(failure)[:_MAX_CAUSE]
            return logprobs * 0.0
