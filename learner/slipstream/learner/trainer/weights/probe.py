"""The probe of a delivery: some sequences, and their log-probabilities under the new weights."""

from __future__ import annotations

import numpy as np
from slipstream.core.settings.config import Config
from slipstream.core.types import TokenArray
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.model import Policy
from slipstream.learner.trainer.model.schedule import sequence_logprobs
from slipstream.protocol.codec import pack_logprobs, pack_tokens
from slipstream.v1 import weights_pb2

NUM_SEQUENCES = 8
MAX_TOKENS = 256


def probe_sequences(batch: Batch | None, *, vocab_size: int, max_tokens: int) -> list[TokenArray]:
    """Returns up to 8 sequences of 2 to `max_tokens` tokens; pseudo-random ones without a batch."""
    if batch is None:
        random = np.random.default_rng(0)
        lengths = np.linspace(8, 32, NUM_SEQUENCES).astype(int).clip(2, max_tokens)
        return [random.integers(0, vocab_size, n).astype(np.uint32) for n in lengths]
    sequences = [t.token_ids[part.tokens] for t in batch.trajectories for part in t.sequences()]
    long_enough = [token_ids for token_ids in sequences if len(token_ids) >= 2]
    stride = max(1, len(long_enough) // NUM_SEQUENCES)
    chosen = long_enough[::stride][:NUM_SEQUENCES]
    return [token_ids[:max_tokens] for token_ids in chosen]


def build_probe(policy: Policy, batch: Batch | None, config: Config) -> weights_pb2.Probe:
    """Returns the probe of the current weights, the same on every rank; collective.

    Each adapter has sequences of its own.
    """
    # The engine wants room for one more token.
    room = min(policy.max_positions, config.sampling.max_episode_tokens) - 1
    names = policy.adapters.names
    parts = {} if batch is None else dict(batch.by_adapter(names))
    sequences: list[TokenArray] = []
    logprobs, adapters = [], []
    for name in names:
        own = probe_sequences(
            parts.get(name),
            vocab_size=policy.vocab_size,
            max_tokens=max(2, min(MAX_TOKENS, room)),
        )
        with policy.adapters.active(name):
            found = sequence_logprobs(policy, own, max_tokens=config.learner.micro_batch_tokens)
        sequences += own
        logprobs += found
        adapters += [name] * len(own)
    return weights_pb2.Probe(
        token_ids=pack_tokens(np.concatenate(sequences)),
        lengths=[len(token_ids) for token_ids in sequences],
        expected_logprobs=pack_logprobs(np.concatenate(logprobs)),
        tolerance=config.probe_tolerance,
        adapters=adapters if policy.adapters.have_names else (),
    )
