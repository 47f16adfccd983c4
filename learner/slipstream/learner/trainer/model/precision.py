"""What 8-bit matrix products ask of settings and numbers of tokens; the scale of float16's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slipstream.core.errors import ConfigError
from slipstream.core.settings.config import LearnerSection
from slipstream.learner.trainer.ranks import compat
from slipstream.learner.trainer.untyped import Megatron


def check_fp8(
    values: Mapping[str, object],
    learner: LearnerSection,
    *,
    has_engine: Callable[[], bool] = compat.has_transformer_engine,
) -> None:
    """Raises ConfigError without TransformerEngine, or when 8-bit parameters would be offloaded.

    `values` are the settings of the model provider.
    """
    if not values.get("fp8"):
        return
    if not has_engine():
        raise ConfigError(
            f"learner.transformer.fp8 {values['fp8']!r} needs TransformerEngine, "
            "which is not installed"
        )
    if values.get("fp8_param") and learner.offload.parameters:
        raise ConfigError(
            "learner.offload.parameters cannot move 8-bit parameters: learner.transformer.fp8_param"
        )


def shared_scaler(optimizer: Megatron) -> Megatron:
    """Makes all parts of an optimizer use the first one's scale of the loss; returns its scaler.

    Megatron gives each part a scaler of its own, but scales the loss by the first one's alone:
    after an overflow in one part the others would divide by a wrong scale. None if the scale is
    constant, or there is none.
    """
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    parts = optimizer.chained_optimizers
    scaler = getattr(parts[0], "grad_scaler", None) if parts else None
    if not isinstance(scaler, DynamicGradScaler):
        return None
    for part in parts:
        part.grad_scaler = scaler
    return scaler


def token_alignment(settings: Megatron) -> int:
    """Returns the divisor of a rank's number of tokens; `settings` are those of the model.

    Matrix units take 8-bit operands in blocks of 16 numbers, and 32 numbers share a scale of mxfp8.
    """
    if not settings.fp8:
        return 1
    return 32 if settings.fp8_recipe == "mxfp8" else 16
