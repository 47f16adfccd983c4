"""The learning rate of the policy: warmup, a constant part, decay."""

from __future__ import annotations

import math
from collections.abc import Callable

from slipstream.core.settings.algorithm_section import DecayKind
from slipstream.core.settings.config import Config

# Shares of the way down after the share x of the decay's steps.
_FALLEN: dict[DecayKind, Callable[[float], float]] = {
    "none": lambda _: 0.0,
    "linear": lambda x: x,
    "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2,
    "sqrt": math.sqrt,
}


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of `step`, a function of the settings alone: a resume changes none.

    It is 0 in the first `critic.warmup_steps` steps, in which only the critic is trained. Then it
    rises linearly over `algorithm.warmup_steps`. It falls in the last `algorithm.decay_steps` of
    the run's steps, and would reach its end, `algorithm.decay_to`, in the step after the last one.
    """
    algorithm = config.algorithm
    first = config.critic.warmup_steps if config.critic is not None else 0
    place, num_steps = step - first, config.run.steps - first
    if place < 0:
        return 0.0
    rise = min(1.0, (place + 1) / max(1, algorithm.warmup_steps))
    falling = algorithm.decay_steps or max(1, num_steps - algorithm.warmup_steps)
    x = min(1.0, max(0.0, (place - (num_steps - falling)) / falling))
    fallen = (1 - algorithm.decay_to) * _FALLEN[algorithm.decay](x)
    return algorithm.learning_rate * rise * (1 - fallen)
