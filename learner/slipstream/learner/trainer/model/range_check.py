"""Whether a model's numbers fit into float16, before it trains.

float16 ends at 65504, where bfloat16 goes on to 3e38. The hidden states of some models are larger:
they would train on nothing but infinities, or with a longer prompt than before. So the real weights
see some sequences once, and the largest number that any layer takes or gives is measured.

Produces: nothing, or ConfigError on every rank. Waits for: the other ranks, which compute parts of
the same pass. Unblocked by: their parts, or the limit of their group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import torch
from slipstream.core.errors import ConfigError
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.model import ParallelModel, unwrapped
from slipstream.learner.trainer.model.schedule import run_schedule
from slipstream.learner.trainer.model.shares import rank_micro_batches
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor

logger = logging.getLogger(__name__)

LARGEST = torch.finfo(torch.float16).max
# The share of the range that is safe: training and other tokens make numbers larger.
MOST_SHARE = 0.5
NUM_SEQUENCES = 8
LONGEST = 64
_SEED = 35


def check_range(model: ParallelModel, *, max_tokens: int) -> None:
    """Raises ConfigError if weights or activations of a float16 model come near its range's end.

    Collective; `max_tokens` are those of a micro batch. The model does not change.
    """
    if model.dtype != torch.float16:
        return
    largest: dict[str, Tensor] = {}
    modules = [pair for chunk in model.chunks for pair in unwrapped(chunk).named_modules()]
    for name, module in modules:
        _note(largest, f"a weight of {name}", [*module.parameters(recurse=False)])
    with ExitStack() as hooks:
        for name, module in modules:
            hooks.enter_context(module.register_forward_hook(_noting(largest, name)))
        _forward(model, max_tokens)
    # The first one if several are infinite: the others follow from it.
    name = max(largest, key=lambda name: float(largest[name]))
    own = json.dumps([name, float(largest[name])]).encode()
    found = [json.loads(data) for data in model.ranks.gather_bytes(own)]
    name, number = max(found, key=lambda pair: pair[1])
    logger.info("the largest number of a float16 model: %s reaches %.4g", name, number)
    if number > MOST_SHARE * LARGEST:
        raise ConfigError(
            f'model.dtype must be "bfloat16" for this model: float16 ends at {LARGEST:.0f}, and '
            f"{name} reaches {number:.0f}; at most half of the range leaves room for training"
        )


def _forward(model: ParallelModel, max_tokens: int) -> None:
    """Runs pseudo-random tokens through the model."""
    random = np.random.default_rng(_SEED)
    longest = max(2, min(LONGEST, max_tokens, model.max_positions))
    sequences = [
        TrainingSequence.of_tokens(random.integers(0, model.vocab_size, length).astype(np.uint32))
        for length in np.linspace(2, longest, NUM_SEQUENCES).astype(int)
    ]
    share = rank_micro_batches(model, sequences, range(len(sequences)), max_tokens=max_tokens)

    def finish(_: int, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
        return output.float().sum(), batch.loss_mask.sum().to(torch.int), None

    with torch.no_grad():
        run_schedule(model, share, finish, forward_only=True)


def _noting(largest: dict[str, Tensor], name: str) -> Callable[..., None]:
    def note(_: Megatron, taken: object, given: object) -> None:
        _note(largest, f"what {name} takes", _tensors(taken))
        _note(largest, f"what {name} gives", _tensors(given))

    return note


def _note(largest: dict[str, Tensor], name: str, tensors: Iterable[Tensor]) -> None:
    """Notes the largest number of float16 in `tensors`; NaN counts as infinite."""
    for tensor in tensors:
        if tensor.dtype == torch.float16 and tensor.numel():
            # The device is not waited for.
            now = tensor.detach().abs().amax().float().nan_to_num(torch.inf, torch.inf)
            largest[name] = torch.maximum(now, largest.get(name, now))


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
