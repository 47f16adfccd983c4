"""Norms that Megatron lacks: with sequence parallelism, before a residual sum, over all heads.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.layers import own_device
from torch import Tensor

# Output of a part of a layer, and a bias that is not yet added to it.
Output = tuple[Tensor, Tensor | None]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works with sequence parallelism, which Megatron's own rejects.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, as Gemma does. It does so in
    float32, since bfloat16 near 1 has steps of 0.008.
    """

    def __init__(
        self,
        config: Megatron,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=own_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_offset = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` normalised over its last dimension."""
        if not self._is_offset:
            return super().forward(x)
        weight = 1.0 + self.weight.float()
        return F.rms_norm(
            x.float(),
            self.normalized_shape,
            weight,
            self.eps,
        ).to(x.dtype)


class NormedResidual(torch.nn.Module):
    """Normalises the output of attention or an MLP before the residual sum.

    It replaces Megatron's `get_bias_dropout_add` in the layer. So an adapter on the last matrix
    adds to that matrix's output, before the norm.
    """

    def __init__(self, config: Megatron, norm: Callable[..., torch.nn.Module]) -> None:
        super().__init__()
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[[Output, Tensor, float], Tensor]:
        """Returns a function of (output, None), residual, dropout that adds the normed output."""
        add = get_bias_dropout_add(training, fused)

        def added(output: Output, residual: Tensor, dropout: float) -> Tensor:
            states, bias = output
            assert bias is None
            total: Tensor = add((self.norm(states), None), residual, dropout)
            return total

        return added


class SplitByHeads(MegatronModule):  # type: ignore[misc]
    """A layer whose parameter `split` is divided over the tensor parallel ranks like the heads."""

    # Bridge reads these marks.
    tensor_model_parallel = True
    partition_dim = 0
    split = "weight"

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Megatron = None,
    ) -> Megatron:
        """Returns the state for distributed checkpoints: the parameter of all heads, if any."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {self.split: 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)


class WholeNorm(SplitByHeads):
    """RMSNorm over all `heads` of a token together; each tensor parallel rank holds some heads."""

    def __init__(self, config: Megatron, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__(config)
        self._eps = eps
        self._width = heads * hidden_size
        self._is_split = config.tensor_model_parallel_size > 1
        width = self._width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.ones(width, dtype=config.params_dtype, device=own_device(config))
        )
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, heads: Tensor) -> Tensor:
        """Normalises [..., own heads, head size]; collective over the tensor parallel ranks."""
        flat = heads.float().flatten(-2)
        total = flat.square().sum(-1, keepdim=True)
        if self._is_split:
            # Every rank's heads depend on the sum, so the gradient of the sum is summed over ranks.
            total = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(total)
            )
        normed = flat * torch.rsqrt(total / self._width + self._eps)
        return (self.weight * normed.to(heads.dtype)).view(heads.shape)


class WholeNormAttention(SelfAttention):  # type: ignore[misc]
    """Attention with `place_norms`' norms; Megatron builds these while `qk_layernorm` is on."""

    def __init__(self, config: Megatron, *args: Megatron, **keywords: Megatron) -> None:
        config.qk_layernorm = True
        super().__init__(config, *args, **keywords)
        config.qk_layernorm = False
