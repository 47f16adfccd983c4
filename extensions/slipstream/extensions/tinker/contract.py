"""Every field of the requests of Tinker's SDK 0.38 that reach this server, with its default.

A field is read, refused unless it has its default, or without effect; a field that is not here is
refused. `checked` is the only way from a body to its fields, so that none is dropped silently.
The guide's page on the contract is made of these tables: `python docs/generate_contract.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from slipstream.extensions.tinker.request_fields import Body, Refused

# The versions whose types these tables follow.
SDK = "tinker 0.38.0"
COOKBOOK = "tinker-cookbook 0.6.1"


class Use(Enum):
    """What becomes of a field."""

    READ = "read"
    # Any value but the default is refused, with the field's text.
    REFUSED = "refused"
    NO_EFFECT = "no effect"


class Required(Enum):
    """The default of a field that has none."""

    REQUIRED = "required"


REQUIRED = Required.REQUIRED


@dataclass(frozen=True)
class Field:
    """A field of a request: its default, what becomes of it, and where or why."""

    default: object
    use: Use
    text: str


Fields: TypeAlias = Mapping[str, Field]


def _read(text: str, default: object = REQUIRED) -> Field:
    return Field(default, Use.READ, text)


def _refused(text: str, default: object = None) -> Field:
    return Field(default, Use.REFUSED, text)


def _idle(text: str, default: object = None) -> Field:
    return Field(default, Use.NO_EFFECT, text)


def _type(name: str) -> Field:
    return _idle("the address says it", name)


_NO_TOKEN = _refused(
    "weights_access_token is of no use here: leave it out, and load states by the api_key that "
    "saved them"
)
_SEQ_ID = _read("its number among the operations of its model", None)
_TTL = _read("how long what is saved stays", None)
_METADATA = _read("told in the lists of RestClient", None)

REQUESTS: Mapping[str, Fields] = {
    "CreateSessionRequest": {
        "tags": _idle("nothing reads labels of sessions", REQUIRED),
        "user_metadata": _idle("nothing reads labels of sessions", REQUIRED),
        "sdk_version": _idle("one wire is spoken, that of the version above", REQUIRED),
        "project_id": _idle("there are no projects here"),
        "display_name": _idle("nothing reads labels of sessions"),
        "type": _type("create_session"),
    },
    "CreateModelRequest": {
        "session_id": _read("the id of the model"),
        "model_seq_id": _read("the id of the model"),
        "base_model": _read("must be the model of the server"),
        "user_metadata": _read("`lora_alpha`, `max_staleness`; told in the lists of runs", None),
        "lora_config": _read("rank, seed and matrices of the adapter", None),
        "optimizer_config": _read("must be adamw", {"type": "adamw"}),
        "type": _type("create_model"),
    },
    "AdamOptimizerConfig": {
        "type": _read("must be adamw", "adamw"),
    },
    "LoraConfig": {
        "rank": _read("the rank of the adapter"),
        "seed": _read("draws the adapter, with `lora.adapters`; else `run.seed` does", None),
        "train_unembed": _idle("the unembedding has no adapter: `lora.target_modules`", True),
        "train_mlp": _read("whether MLPs have adapters", True),
        "train_attn": _read("whether attention has adapters", True),
    },
    "LoadWeightsRequest": {
        "model_id": _read("the model that loads", None),
        "seq_id": _SEQ_ID,
        "session_id": _read("the id of a new model", None),
        "model_seq_id": _read("the id of a new model", None),
        "base_model": _read("must be the model of the server", None),
        "user_metadata": _read("`max_staleness` of a new model; told in the lists of runs", None),
        "path": _read("the state"),
        "optimizer": _read("whether Adam goes on"),
        "optimizer_config": _read("must be adamw", None),
        "weights_access_token": _NO_TOKEN,
        "type": _type("load_weights"),
    },
    "OptimStepRequest": {
        "adam_params": _read("the numbers of Adam"),
        "optimizer_params": _refused("this server has Adam only (adam_params)"),
        "model_id": _read("the model"),
        "seq_id": _SEQ_ID,
        "type": _type("optim_step"),
    },
    "AdamParams": {
        "learning_rate": _read("from 0 to 1e6", 1e-4),
        "beta1": _read("from 0, below 1", 0.9),
        "beta2": _read("from 0, below 1", 0.95),
        "eps": _read("above 0 in float32, to 1e6", 1e-12),
        "weight_decay": _read("from 0 to 1e6; decoupled, and not of norms", 0.0),
        "grad_clip_norm": _read("to 1e18; 0 and less: no limit", 0.0),
    },
    "SaveWeightsRequest": {
        "model_id": _read("the model"),
        "path": _read("the name of the state", None),
        "seq_id": _SEQ_ID,
        "ttl_seconds": _TTL,
        "overwrite": _read("whether the name may be in use", False),
        "user_metadata": _METADATA,
        "type": _type("save_weights"),
    },
    "SaveWeightsForSamplerRequest": {
        "model_id": _read("the model"),
        "path": _read("the name of the weights", None),
        "sampling_session_seq_id": _read("the id of the sampling session", None),
        "kind": _read("snapshot, or inflight: the newest weights", "snapshot"),
        "seq_id": _SEQ_ID,
        "ttl_seconds": _TTL,
        "user_metadata": _METADATA,
        "type": _type("save_weights_for_sampler"),
    },
    "SaveWeightsExternalRequest": {
        "model_id": _read("the model"),
        "path": _read("the name of the files"),
        "seq_id": _SEQ_ID,
        "ttl_seconds": _TTL,
        "age_encryption_recipients": _refused(
            "files are not encrypted here: leave age_encryption_recipients out"
        ),
        "type": _type("save_weights_external"),
    },
    "CreateSamplingSessionRequest": {
        "session_id": _read("the id of the sampling session"),
        "sampling_session_seq_id": _read("the id of the sampling session"),
        "base_model": _read("must be the model of the server, without a path", None),
        "model_path": _read("the weights", None),
        "type": _type("create_sampling_session"),
    },
    "SampleRequest": {
        "num_samples": _read("replies, at most 65,536", 1),
        "prompt": _read("text as token ids"),
        "sampling_params": _read("how replies are drawn", REQUIRED),
        "base_model": _idle("the sampling session has it"),
        "model_path": _idle("the sampling session has it"),
        "sampling_session_id": _read("the weights", None),
        "seq_id": _read("its number in the sampling session", None),
        "prompt_logprobs": _read("those of the whole prompt", None),
        "topk_prompt_logprobs": _refused(
            "topk_prompt_logprobs is not served; prompt_logprobs has those of the prompt's tokens",
            0,
        ),
        "topk_sample_logprobs": _refused(
            "topk_sample_logprobs is not served; replies have those of their own tokens", 0
        ),
        "target_prompt_logprobs": _refused(
            "target_prompt_logprobs is not served; prompt_logprobs has those of the prompt's tokens"
        ),
        "prompt_alt_tokens_k": _refused(
            "prompt_alt_tokens_k is not served: sample the tokens behind a prompt", 0
        ),
        "prompt_logprobs_last_n": _refused(
            "prompt_logprobs_last_n is not served; prompt_logprobs has those of the whole prompt"
        ),
        "record_stability_info": _idle(
            "nothing is recorded: a pass of `stable_reinforce` is refused or has a fallback"
        ),
        "type": _type("sample"),
    },
    "ModelInput": {
        "chunks": _read("the parts of a prompt, one after the other"),
    },
    "EncodedTextChunk": {
        "tokens": _read("token ids"),
        "type": _read("must be encoded_text", "encoded_text"),
    },
    "SamplingParams": {
        "max_tokens": _read("most tokens of a reply; None: all that there is room for", None),
        "seed": _read("reply 0 has it, reply 1 the next number", None),
        "stop": _read("texts or token ids; []: nothing stops a reply", None),
        "temperature": _read("0: the most likely token", 1.0),
        "top_k": _read("-1: no limit", -1),
        "top_p": _read("above 0", 1.0),
    },
    "FutureRetrieveRequest": {
        "request_id": _read("the operation"),
        "allow_metadata_only": _idle("results come whole", False),
    },
    "GetInfoRequest": {
        "model_id": _read("the model"),
        "type": _type("get_info"),
    },
    "SessionHeartbeatRequest": {
        "session_id": _read("the session whose models keep their places"),
        "type": _type("session_heartbeat"),
    },
    "ClientConfigRequest": {
        "sdk_version": _idle("one wire is spoken, that of the version above", REQUIRED),
    },
}

# The messages of forward_backward are protobuf.
MESSAGES: Mapping[str, Fields] = {
    "ForwardBackwardRequest": {
        "model_id": _read("the model"),
        "seq_id": _read("its number among the operations of its model"),
        "data": _read("the sequences"),
        "loss_fn": _read("the loss"),
        "loss_fn_config": _read("the numbers of the loss"),
        "forward_only": _read("whether no gradient is kept"),
        "loss_fn_config_v2": _read("the numbers of the loss, and `fallback`"),
    },
    "Datum": {
        "model_input": _read("the tokens"),
        "loss_fn_inputs": _read("targets and values of the loss"),
        "model_input_spans": _idle("only `stable_reinforce` needs to know where tokens came from"),
        "loss_fn_input_spans": _idle(
            "only `stable_reinforce` needs to know where tokens came from"
        ),
    },
    "Chunk": {
        "encoded_text": _read("token ids"),
        "image": _refused("this server takes text"),
        "dmel": _refused("this server takes text"),
    },
    "Tensor": {
        "dense": _read("the values"),
        "sparse_csr": _refused("must be a dense tensor of one dimension"),
        "dtype": _read("float32 or int64"),
        "shape": _read("one dimension"),
    },
    "LossConfigValue": {
        "number": _read("a number of the loss"),
        "text": _read("the loss in place of `stable_reinforce`"),
    },
}

# The inputs of losses that the SDK names, in a datum's `loss_fn_inputs`.
LOSS_INPUTS: Fields = {
    "target_tokens": _read("the tokens that the positions predict"),
    "weights": _read("of `cross_entropy`"),
    "advantages": _read("of all other losses"),
    "logprobs": _read("of all other losses: those by the policy that sampled"),
    "sequence_ratio_mask": _read("of `gspo`; without it, where the advantage is not 0"),
    "clip_low_threshold": _refused("loss_fn_config has thresholds for all tokens alike"),
    "clip_high_threshold": _refused("loss_fn_config has thresholds for all tokens alike"),
}

# Types of the SDK's requests none of whose fields is read, with the reason.
UNREAD: Mapping[str, str] = {
    "CopyWeightsRequest": "`copy_weights` is not served",
    "CreateCustomLossRequest": "`create_custom_loss` is not served",
    "DimuonOptimizerConfig": "refused: the optimizer is adamw",
    "DimuonParams": "refused: the optimizer is adamw",
    "DmelChunk": "refused: this server takes text",
    "FuturesRetrieveRequest": "`retrieve_futures` is not served",
    "GetBillingUsageRequest": "`billing/usage` is not served",
    "GetCurrentCheckpointStorageUsageRequest": "`billing/usage` is not served",
    "ImageAssetPointerChunk": "refused: this server takes text",
    "ImageChunk": "refused: this server takes text",
    "JoinSamplingSessionRequest": "`join_sampling_session` is not served",
    "SessionSearchRequest": "only the end of a session is taken",
    "TelemetrySendRequest": "no effect: reports on the client are taken and kept nowhere",
    "UnloadModelRequest": "`unload_model` is not served",
}

# Addresses of the SDK that answer 404, with the reason.
UNSERVED: Mapping[str, str] = {
    "audit": "there is no audit log",
    "auth/apikey/me": "any api_key is taken",
    "auth/token": "any api_key is taken",
    "billing/usage": "nothing is billed",
    "cancel_future": "a request that was sent is carried out",
    "copy_weights": "a state is loaded by its path",
    "create_custom_loss": "forward_backward_custom computes a loss in the client",
    "join_sampling_session": "a sampling session is named by its id",
    "publish": "a state is loaded by the api_key that saved it",
    "retrieve_futures": "retrieve_future has each result",
    "sessions": "only the end of a session is taken",
    "unload_model": "the end of a session frees the places of its models",
}


def checked(request: str, body: Body) -> dict[str, Any]:
    """Returns the fields of a body that are read, with their defaults.

    Raises Refused for a field that is unknown, refused or missing.
    """
    fields = REQUESTS[request]
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            raise Refused(f"{request} has no field {name}: this server speaks the wire of {SDK}")
        is_default = value is None or value == field.default
        if field.use is Use.REFUSED and not is_default:
            raise Refused(field.text)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if field.use is not Use.READ:
            continue
        if field.default is REQUIRED and name not in body:
            raise Refused(f"{request} needs {name}")
        values[name] = body.get(name, field.default)
    return values
