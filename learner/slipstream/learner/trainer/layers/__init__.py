"""Layers of the models: attention, experts, norms, rotary embeddings, shared prefixes."""

import torch
from slipstream.learner.trainer import Megatron


def own_device(config: Megatron) -> torch.device | int:
    """Returns the device on which a layer must create its parameters.

    Bridge scatters weights to the tensor parallel ranks from the parameters' device, and NCCL
    cannot read host memory.
    """
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


def mlp_parts(layer: Megatron) -> Megatron:
    """Returns the classes of the parts of an MLP or a mixture in the spec of a `layer`."""
    return layer.mlp.keywords["submodules"]
