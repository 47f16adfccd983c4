"""What becomes of each field of the SDK's requests is what the table of the contract says."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import operations, requested_passes
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.extensions.tinker.contract import (
    LOSS_INPUTS,
    MESSAGES,
    REQUESTS,
    Use,
    checked,
)
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.v1 import operations_pb2 as pb

MODEL = "s1:train:0"


def config_of() -> Config:
    table = {
        "run": {"name": "own", "steps": 10, "seed": 5},
        "model": {"path": "models/tiny", "dtype": "float32"},
        "sampling": {"max_reply_tokens": 8, "max_episode_tokens": 16},
        "controller": {"client_loop": True},
        "learner": {"shared_prefix_tokens": 0},
        "lora": {
            "rank": 64,
            "alpha": 16.0,
            "publish": "adapters",
            "adapters": ["a", "b"],
        },
    }
    return parse_config(table, source="test")


CONFIG = config_of()
LORA = {"rank": 8}
CREATE = {
    "session_id": "s1",
    "model_seq_id": 0,
    "base_model": "tiny",
    "lora_config": LORA,
}
LOAD = {"model_id": MODEL, "seq_id": 3, "path": "tinker://x", "optimizer": True}
LOAD_NEW = {
    "session_id": "s1",
    "model_seq_id": 1,
    "path": "tinker://x",
    "optimizer": True,
}
STEP = {"model_id": MODEL, "seq_id": 3, "adam_params": {}}
SAVE = {"model_id": MODEL, "seq_id": 3}
PUBLISH = SAVE | {"sampling_session_seq_id": 2}
EXTERNAL = SAVE | {"path": "x"}
SESSION = {"session_id": "s1", "sampling_session_seq_id": 3, "base_model": "tiny"}
TEXT = {"tokens": [5, 6]}
PROMPT = {"chunks": [TEXT]}
SAMPLE = {
    "sampling_session_id": "s1:sample:0",
    "seq_id": 7,
    "prompt": PROMPT,
    "sampling_params": {},
}
# Fields of a load that begins a model.
OF_NEW = ("session_id", "model_seq_id", "user_metadata")
Outcome = Callable[[Mapping[str, Any]], object]


def without_times(operation: pb.Operation) -> bytes:
    operation.kept.until_unix_s = bool(operation.kept.until_unix_s)
    return operation.SerializeToString(deterministic=True)


def saved(kind: str) -> Outcome:
    return lambda body: without_times(operations.save(kind, body))


# A request that is carried out, and what comes of one.
BASES: dict[str, tuple[Mapping[str, Any], Outcome]] = {
    "CreateModelRequest": (CREATE, lambda body: operations.create_model(body, CONFIG)),
    "AdamOptimizerConfig": (
        {},
        lambda body: operations.create_model(
            CREATE | {"optimizer_config": body}, CONFIG
        ),
    ),
    "LoraConfig": (
        LORA,
        lambda body: operations.create_model(CREATE | {"lora_config": body}, CONFIG),
    ),
    "LoadWeightsRequest": (LOAD, lambda body: operations.load_weights(body, CONFIG)),
    "OptimStepRequest": (STEP, operations.optim_step),
    "AdamParams": (
        {},
        lambda body: operations.optim_step(STEP | {"adam_params": body}),
    ),
    "SaveWeightsRequest": (SAVE, saved("save_weights")),
    "SaveWeightsForSamplerRequest": (PUBLISH, saved("save_weights_for_sampler")),
    "SaveWeightsExternalRequest": (EXTERNAL, saved("save_weights_external")),
    "CreateSamplingSessionRequest": (
        SESSION,
        lambda body: operations.sampling_session(body, CONFIG),
    ),
    "SampleRequest": (SAMPLE, lambda body: operations.sample(body, CONFIG, 7)),
    "ModelInput": (
        PROMPT,
        lambda body: operations.sample(SAMPLE | {"prompt": body}, CONFIG, 7),
    ),
    "EncodedTextChunk": (
        TEXT,
        lambda body: operations.sample(
            SAMPLE | {"prompt": {"chunks": [body]}}, CONFIG, 7
        ),
    ),
    "SamplingParams": (
        {},
        lambda body: operations.sample(SAMPLE | {"sampling_params": body}, CONFIG, 7),
    ),
}
# The front reads these requests itself.
FRONT: dict[str, Mapping[str, Any]] = {
    "CreateSessionRequest": {},
    "ClientConfigRequest": {},
    "FutureRetrieveRequest": {"request_id": "s1:a"},
    "GetInfoRequest": {"model_id": MODEL},
    "SessionHeartbeatRequest": {"session_id": "s1"},
}
BASES |= {
    name: (base, functools.partial(checked, name)) for name, base in FRONT.items()
}
# Values of fields other than those of the bases.
OTHERS: dict[str, object] = {
    "session_id": "s2",
    "model_seq_id": 4,
    "base_model": "other",
    "user_metadata": {"max_staleness": "2"},
    "optimizer_config": {"type": "dimuon"},
    "lora_config": {"rank": 2},
    "rank": 4,
    "seed": 9,
    "train_unembed": False,
    "train_mlp": False,
    "train_attn": False,
    "model_id": "s2:train:0",
    "seq_id": 9,
    "path": "y",
    "optimizer": False,
    "weights_access_token": "token",
    "adam_params": {"beta1": 0.5},
    "optimizer_params": {"type": "dimuon"},
    "learning_rate": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 0.5,
    "weight_decay": 0.5,
    "grad_clip_norm": 0.5,
    "ttl_seconds": 60,
    "overwrite": True,
    "sampling_session_seq_id": 5,
    "kind": "inflight",
    "age_encryption_recipients": ["age1"],
    "model_path": "tinker://y",
    "num_samples": 3,
    "chunks": [{"tokens": [1]}],
    "tokens": [1],
    "prompt": {"chunks": [{"tokens": [1]}]},
    "sampling_params": {"top_k": 3},
    "sampling_session_id": "s1:sample:5",
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
    "topk_sample_logprobs": 2,
    "target_prompt_logprobs": {"data": [1]},
    "prompt_alt_tokens_k": 2,
    "prompt_logprobs_last_n": 1,
    "record_stability_info": True,
    "max_tokens": 2,
    "stop": ["x"],
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "request_id": "s1:b",
    "allow_metadata_only": True,
    "tags": ["a"],
    "sdk_version": "9",
    "project_id": "p",
    "display_name": "d",
    "type": "other",
}
CASES = [(request, name) for request, fields in REQUESTS.items() for name in fields]


@pytest.mark.parametrize(("request_type", "name"), CASES)
def test_each_field_is_read_refused_or_without_effect_as_the_table_says(
    request_type, name
) -> None:
    base, outcome = BASES[request_type]
    if request_type == "LoadWeightsRequest" and name in OF_NEW:
        base = LOAD_NEW
    field = REQUESTS[request_type][name]
    changed = {**base, name: OTHERS[name]}
    usual = outcome(base)
    if field.use is Use.REFUSED:
        with pytest.raises(Refused) as refusal:
            outcome(changed)
        assert str(refusal.value) == field.text
        # The SDK sends defaults, too.
        assert outcome({**base, name: field.default}) == usual
        return
    try:
        result = outcome(changed)
    except Refused as refusal:
        result = str(refusal)
    assert (result != usual) == (field.use is Use.READ)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_a_field_that_the_sdk_does_not_have_is_refused(request_type: str) -> None:
    base, outcome = BASES[request_type]
    with pytest.raises(
        Refused, match=f"{request_type} has no field moments: this server speaks"
    ):
        outcome({**base, "moments": 1})


def test_the_wire_has_each_field_of_the_messages() -> None:
    for name, fields in MESSAGES.items():
        assert {field.name for field in getattr(wire, name).DESCRIPTOR.fields} == {
            *fields
        }


def test_each_input_of_a_loss_is_read_by_one_or_refused() -> None:
    read = {name for name, field in LOSS_INPUTS.items() if field.use is Use.READ}
    inputs: set[str] = set()
    for loss in requested_passes.LOSSES.values():
        inputs |= {*loss.inputs, *loss.optional}
    assert read == inputs


@pytest.mark.parametrize("loss_fn", requested_passes.LOSSES)
def test_each_setting_of_a_loss_has_its_range_and_its_default(loss_fn: str) -> None:
    def arguments(**config: float) -> dict[str, object]:
        request = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn=loss_fn)
        request.loss_fn_config.update(config)
        return json.loads(
            requested_passes.forward_backward(request).compute.loss_args_json
        )

    for name, setting in requested_passes.LOSSES[loss_fn].settings.items():
        assert arguments(**{name: setting.default}) == arguments()
        for bound in (setting.lowest, setting.highest):
            assert np.isfinite(arguments(**{name: bound})[setting.argument])
        beyond = (
            setting.lowest - 1e-3,
            setting.highest * 1.001,
            np.nan,
            np.inf,
            -np.inf,
        )
        for value in beyond:
            with pytest.raises(
                Refused, match=f"loss_fn_config.{name} of {loss_fn} is a number fr"
            ):
                arguments(**{name: value})
