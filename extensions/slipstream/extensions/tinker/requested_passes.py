"""What forward_backward asks for, as passes of the trainer; no I/O.

The ranges and defaults of the losses are those of Tinker's pages on PPO, CISPO and GSPO, and of its
tutorial on loss functions, as of November 2026.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf.unknown_fields import UnknownFieldSet
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.extensions.tinker.contract import LOSS_INPUTS, SDK, Use
from slipstream.extensions.tinker.request_fields import Refused, number
from slipstream.v1 import operations_pb2 as pb

TRAINER = "slipstream.extensions.tinker.trainer"
# Ratios are cut at exp(20), so that a larger bound is none.
LARGEST_RATIO = 1e9
LARGEST_BETA = 1e3
# The token ids that a message can hold are below this.
MAX_TOKENS = 1 << 32
# A loss without a formula that anybody else could compute, and the setting that names another.
UNPUBLISHED = "stable_reinforce"
FALLBACK = "fallback"
_DTYPES = {wire.FLOAT32: "<f4", wire.INT64: "<i8"}

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossSetting:
    """A number of `loss_fn_config`."""

    default: float
    lowest: float
    highest: float
    # The name of the argument of the trainer's loss, and its value for this number.
    argument: str
    convert: Callable[[float], float] = float


@dataclass(frozen=True)
class Loss:
    """A loss_fn: the trainer's loss, its fixed arguments, its settings, its inputs."""

    name: str
    fixed: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, LossSetting] = field(default_factory=dict)
    # The input that is the worth of each target, and further ones.
    worth: str = "advantages"
    needed: tuple[str, ...] = ("logprobs",)
    optional: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that each datum must have."""
        return ("target_tokens", self.worth, *self.needed)


def _clip(low: float, high: float) -> Mapping[str, LossSetting]:
    return {
        "clip_low_threshold": LossSetting(low, 0.0, 1.0, "clip_low", lambda ratio: 1.0 - ratio),
        "clip_high_threshold": LossSetting(
            high, 1.0, LARGEST_RATIO, "clip_high", lambda ratio: ratio - 1.0
        ),
    }


_OF_SAMPLER = {"ratio": "behavior"}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss("reinforce", worth="weights", needed=()),
    "importance_sampling": Loss(f"{TRAINER}:importance_sampling"),
    "ppo": Loss("ppo", _OF_SAMPLER, _clip(0.8, 1.2)),
    "cispo": Loss("cispo", _OF_SAMPLER, _clip(0.0, 4.0)),
    "gspo": Loss("gspo", _OF_SAMPLER, _clip(0.8, 1.2), optional=("sequence_ratio_mask",)),
    "dro": Loss(f"{TRAINER}:dro", {}, {"beta": LossSetting(0.05, 0.0, LARGEST_BETA, "beta")}),
}


def forward_backward(request: wire.ForwardBackwardRequest) -> pb.Operation:
    """Returns the operation of forward_backward, or of forward."""
    _check_known(request, "the request")
    name, settings = _loss_of(request)
    loss = LOSSES[name]
    arguments: dict[str, float | str] = dict(loss.fixed)
    for key, setting in loss.settings.items():
        value = settings.pop(key, setting.default)
        checked = number(
            f"loss_fn_config.{key} of {name}",
            value,
            lowest=setting.lowest,
            highest=setting.highest,
        )
        arguments[setting.argument] = setting.convert(checked)
    if settings:
        raise Refused(f"loss_fn {name} has no setting {min(settings)}")
    model = request.model_id
    operation = pb.Operation(
        id=f"{model}:{request.seq_id}:forward_backward", stream=model, number=request.seq_id
    )
    # In its place: a message that is put into another one is copied.
    compute = operation.compute
    compute.id = operation.id
    compute.backward = not request.forward_only
    compute.loss = loss.name
    compute.loss_args_json = json.dumps(arguments)
    for place, datum in enumerate(request.data):
        _check_known(datum, f"datum {place}")
        compute.sequences.add(**_sequence(place, datum, name))
    return operation


def _check_known(message: wire.ForwardBackwardRequest | wire.Datum, where: str) -> None:
    """Raises Refused if a message has a field that this server's wire lacks."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        number = unknown.field_number
        raise Refused(f"{where} has a field {number}, which the wire of {SDK} does not have")


def _loss_of(request: wire.ForwardBackwardRequest) -> tuple[str, dict[str, object]]:
    """Returns the loss of a pass and its settings, those of the fallback of an unpublished one."""
    settings: dict[str, object] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        settings[key] = getattr(value, value.WhichOneof("value") or "number")
    name = request.loss_fn
    if name == UNPUBLISHED:
        name = str(settings.pop(FALLBACK, ""))
        if name not in LOSSES:
            raise Refused(
                f"loss_fn {UNPUBLISHED} is not served, since its formula is not published: name "
                f'another loss_fn, or the one to take its place, loss_fn_config = {{"{FALLBACK}": '
                f'"importance_sampling"}}; there are {", ".join(LOSSES)}'
            )
        logger.warning("%s: loss_fn %s is computed as %s", request.model_id, UNPUBLISHED, name)
    if name not in LOSSES:
        raise Refused(f"loss_fn {name} is not served; there are {', '.join(LOSSES)}")
    return name, settings


def _sequence(place: int, datum: wire.Datum, loss_fn: str) -> dict[str, bytes]:
    if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise Refused(f"datum {place} has an image or sound; this server takes text")
    loss = LOSSES[loss_fn]
    arrays: dict[str, Array] = {}
    for name, tensor in datum.loss_fn_inputs.items():
        field = LOSS_INPUTS.get(name)
        if field is not None and field.use is Use.REFUSED:
            raise Refused(f"datum {place}: {name} is not served: {field.text}")
        if name not in (*loss.inputs, *loss.optional):
            raise Refused(f"datum {place}: loss_fn {loss_fn} has no input {name}")
        if tensor.dtype not in _DTYPES or tensor.sparse_csr or len(tensor.shape) > 1:
            raise Refused(f"datum {place}: {name} must be a dense tensor of one dimension")
        arrays[name] = np.frombuffer(tensor.dense, dtype=_DTYPES[tensor.dtype])
    for name in loss.inputs:
        if name not in arrays:
            raise Refused(f"datum {place}: loss_fn {loss_fn} needs {name}")
    targets = arrays["target_tokens"]
    if targets.dtype.kind != "i":
        raise Refused(f"datum {place}: target_tokens must be integers")
    if strange := targets[(targets < 0) | (targets >= MAX_TOKENS)].tolist():
        raise Refused(
            f"datum {place}: target_tokens has {strange[0]}, which is no token; {loss.worth} of 0 "
            "leave a token out"
        )
    sequence = {
        "token_ids": b"".join(chunk.encoded_text.tokens for chunk in datum.model_input),
        "targets": targets.astype("<u4").tobytes(),
        "advantages": arrays[loss.worth].astype("<f4").tobytes(),
    }
    if "logprobs" in arrays:
        if np.isnan(arrays["logprobs"]).any():
            raise Refused(
                f"datum {place}: logprobs has NaN, as replies have that were sampled with top_p "
                "below 1 or top_k above 0: theirs would be of a part of the vocabulary, and "
                f"loss_fn {loss_fn} compares with the whole; sample what is trained with top_p = 1"
            )
        sequence["behavior_logprobs"] = arrays["logprobs"].astype("<f4").tobytes()
    if "sequence_ratio_mask" in arrays:
        sequence["ratio_mask"] = (arrays["sequence_ratio_mask"] != 0).tobytes()
    return sequence
