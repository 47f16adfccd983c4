"""Layers of the models, and what they share within a micro batch."""

import torch
from slipstream.learner.trainer import Megatron


def own_device(config: Megatron) -> torch.device | int:
    """Returns where a layer's new parameters lie.

    Bridge scatters weights to the tensor parallel ranks on the device of the parameters, and NCCL
    reads no main memory.
    """
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
