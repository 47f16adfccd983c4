"""Layers of the models: attention, experts, norms, rotary embeddings, shared prefixes."""

import torch
from slipstream.learner.trainer import Megatron


def own_device(config: Megatron) -> torch.device | int:
    """Returns where a layer makes its parameters, from which Bridge scatters weights, by NCCL."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


def mlp_parts(layer: Megatron) -> Megatron:
    """Returns the classes of the parts of an MLP or a mixture in the spec of a `layer`."""
    return layer.mlp.keywords["submodules"]
