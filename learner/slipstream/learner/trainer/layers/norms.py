"""Norms that Megatron lacks: with sequence parallelism, over all heads.

The classes inherit from Megatron's, so import this module only after `compat.install`.
"""

import torch
import torch.nn.functional as F
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


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that works with sequence parallelism, which Megatron's own rejects.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + weight, as Qwen3-Next does, in
    float32, since bfloat16 near 1 has steps of 0.008.
    """

    def __init__(self, config: Megatron, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=own_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_offset = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` normalised over its last dimension."""
        if not self._is_offset:
            return super().forward(x)
        weight = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


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
        state, split = self.state_dict(prefix="", keep_vars=True), {self.split: 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)


class WholeNorm(SplitByHeads):
    """RMSNorm over all `heads` of a token together; each tensor parallel rank holds some heads."""

    def __init__(self, config: Megatron, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__(config)
        self._eps, self._width = eps, heads * hidden_size
        self._is_split = config.tensor_model_parallel_size > 1
        own = self._width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(
            torch.ones(own, dtype=config.params_dtype, device=own_device(config))
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
    """Attention with norms over all heads; Megatron builds these while `qk_layernorm` is on."""

    def __init__(self, config: Megatron, *args: Megatron, **named: Megatron) -> None:
        config.qk_layernorm = True
        super().__init__(config, *args, **named)
        config.qk_layernorm = False
