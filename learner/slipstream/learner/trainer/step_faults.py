"""Refuses a batch that cannot be trained; finds the cause of a loss that is not finite."""

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from slipstream.core.errors import RunFailed, UntrainableBatch
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.algorithms.loss import StepStatistics, TokenLoss
from slipstream.learner.trainer.batches.batch import (
    MAX_TOLD,
    Batch,
    check_data,
    check_experts,
    check_pixels,
    check_references,
    check_staleness,
    untrainable,
)
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.model import ParallelModel, Policy
from slipstream.learner.trainer.model.schedule import forward_logprobs
from slipstream.learner.trainer.model.shares import Forward, masked_outputs
from slipstream.learner.trainer.part import StepPart


def check_batch(batch: Batch, model: ParallelModel, config: Config) -> None:
    """Raises the error of the first check of the data that fails, on every rank; collective."""
    check_staleness(batch, config.algorithm.max_staleness)
    check_data(
        batch,
        max_tokens=config.learner.micro_batch_tokens * model.ranks.cp_size,
        multiple=model.sequence_multiple,
        vocab_size=model.vocab_size,
    )
    check_pixels(batch.trajectories, model.ranks)
    if config.algorithm.router_replay != "off":
        check_experts(batch.trajectories, model.chunks[0].config)
    reference = config.reference
    if reference is not None and reference.server is not None:
        check_references(batch, top_k=reference.top_k, vocab_size=model.vocab_size)


def loss_fault(
    policy: Policy,
    config: Config,
    batch: Batch,
    chosen: Mapping[int, TrainingSequence],
    losses: Sequence[TokenLoss],
    *,
    total: float,
    fault: str,
) -> RunFailed:
    """Returns the error that names the cause of a mini-batch loss that is not finite; collective.

    `chosen` has the sequences of the mini-batch by their index in the batch, `losses` the losses of
    this rank's micro batches, and `total` the loss over all ranks. `fault` describes an error of
    the user's own function, or is "". The result is UntrainableBatch if the batch is at fault, and
    another RunFailed if the weights or the user's function are.
    """
    cause = f"the loss is {total}; the weights were not changed"
    sequences = list(chosen.values())

    def are_finite(forward: Forward) -> list[bool]:
        found = masked_outputs(
            policy, sequences, forward, max_tokens=config.learner.micro_batch_tokens
        )
        return [bool(np.isfinite(values).all()) for values in found]

    trained = [bool(sequence.loss_mask.any()) for sequence in sequences]
    # These log-probabilities depend only on the tokens and the weights.
    temperature = config.sampling.temperature
    scored = are_finite(functools.partial(forward_logprobs, policy, temperature=temperature))
    if not any(itertools.compress(scored, trained)):
        hint = ""
        if policy.dtype == torch.float16:
            hint = '; float16 ends at 65504, and model.dtype = "bfloat16" may hold this model'
        return RunFailed(
            f"{cause}; the policy finds no finite log-probability in any sequence: its weights "
            f"are at fault, not the batch{hint}"
        )
    known = are_finite(lambda _: [one.token_losses for one in losses])
    faulty = [index for index, is_known in zip(chosen, known, strict=True) if not is_known]
    if fault and all(scored):
        found = dict.fromkeys(batch.group_ids[batch.owners[index]] for index in faulty)
        groups = f", group {', '.join([*found][:MAX_TOLD])}" if found else ""
        return RunFailed(f"step {batch.step + 1}{groups}: {fault}; the weights were not changed")
    return untrainable(batch, faulty, cause)


def check_bits(algorithm: AlgorithmSection, step: int, found: StepStatistics) -> None:
    """Raises RunFailed if `agreement` is "bits" and log-probs of learner and engine differ."""
    # In later passes the ratios are those to the first.
    number = found.unequal_tokens
    if algorithm.agreement == "bits" and number:
        raise RunFailed(
            f"step {step + 1}: algorithm.agreement = 'bits', but {number} tokens that the same "
            "weights sampled have other log-probabilities in the learner than in the engine, "
            f"by up to {found.largest_gap:.1e}: their devices, versions of torch or of vLLM "
            "differ; the weights were not changed"
        )


def check_weights(policy: Policy, parts: Sequence[StepPart], fault: UntrainableBatch) -> None:
    """Raises RunFailed from `fault` if the weights of a model are not finite; collective."""
    models = [("policy", policy), *(pair for part in parts for pair in part.models().items())]
    found = {name: float(model.count_not_finite()) for name, model in models}
    for name in policy.adapters.names[1:]:
        with policy.adapters.active(name):
            found[f"policy's adapter {name}"] = float(policy.count_not_finite())
    counts = torch.tensor([*found.values()])
    for name, count in zip(found, policy.ranks.sum(counts).tolist(), strict=True):
        if count:
            raise RunFailed(
                f"weights of the {name} are not finite, and no batch can be trained: {fault}"
            ) from fault
