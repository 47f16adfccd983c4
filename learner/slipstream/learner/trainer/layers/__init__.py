"""Layers of the models: attention, experts, norms, rotary embeddings, shared prefixes."""

from collections.abc import Callable, Iterable

import torch
from slipstream.learner.trainer import Megatron
from torch import Tensor


def own_device(config: Megatron) -> torch.device | int:
    """Returns where a layer makes its parameters, from which Bridge scatters weights, by NCCL."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


def mlp_parts(layer: Megatron) -> Megatron:
    """Returns the classes of the parts of an MLP or a mixture in the spec of a `layer`."""
    return layer.mlp.keywords["submodules"]


def keep_buffers(module: Megatron, names: Iterable[str]) -> None:
    """Makes a cast of `module` leave the values of its buffers `names`, which only move."""
    convert = module._apply

    def kept(function: Callable[[Tensor], Tensor], recurse: bool = True) -> Megatron:
        buffers = {name: getattr(module, name) for name in names}
        converted = convert(function, recurse)
        for name, value in buffers.items():
            setattr(module, name, value.to(getattr(module, name).device))
        return converted

    module._apply = kept
