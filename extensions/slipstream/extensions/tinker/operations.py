"""What requests of the Tinker API mean as operations, and results as its answers; no I/O.

Identities come from the client's own numbers, so that a request that is sent twice is one
operation, and the HTTP process needs no memory.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ATTENTION, MLP
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import trainer_pb2

Body: TypeAlias = Mapping[str, Any]
# By the name of a loss's setting: the argument of its loss for a value.
_Settings: TypeAlias = Mapping[str, Callable[[float], tuple[str, float]]]

OWN = "slipstream.extensions.tinker.trainer"
_CLIP: _Settings = {
    "clip_low_threshold": lambda value: ("clip_low", 1.0 - value),
    "clip_high_threshold": lambda value: ("clip_high", value - 1.0),
}
_BEHAVIOR = {"ratio": "behavior"}
# The loss of each loss_fn: its name, its fixed arguments, and its settings.
LOSSES: Mapping[str, tuple[str, dict[str, str], _Settings]] = {
    "cross_entropy": ("reinforce", {}, {}),
    "importance_sampling": (f"{OWN}:importance_sampling", {}, {}),
    "ppo": ("ppo", _BEHAVIOR, _CLIP),
    "cispo": ("cispo", _BEHAVIOR, _CLIP),
    "gspo": ("gspo", _BEHAVIOR, _CLIP),
    "dro": (f"{OWN}:dro", {}, {"beta": lambda value: ("beta", value)}),
}
_DTYPES = {wire.FLOAT32: "<f4", wire.INT64: "<i8"}
# Settings of a sample without which a client would get something else.
_UNSERVED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
)
_NOT_A_NUMBER = np.float32(np.nan).tobytes()
# The token ids that a message can hold are below this.
_TOKENS = 1 << 32
# The largest seed of a sample; each further reply to its prompt has the next number.
_LARGEST_SEED = 1 << 52
_MAX_TTL_S = 10**10
# The key of a model's metadata that has its alpha, which the SDK has no word for.
ALPHA = "lora_alpha"
# The key that has the most steps behind which its replies may be.
MAX_STALENESS = "max_staleness"
# Stands between the id of a sampling session and the name of its weights.
_OF = "+"
# Ends the name of weights that every publish in flight of a model replaces.
_IN_FLIGHT = ":inflight"
# The calls that save, by the kind of path under which others find what they save. The REST calls
# export the files of external weights.
SAVES = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}


class Refused(ValueError):
    """Raised for a request that this server does not carry out; the text names what can.

    With the status 429 or 503 it is to be sent again: it waits for room, a controller or a file.
    """

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def training_run(body: Body) -> str:
    """Returns the id of the model that a request creates, as the SDK makes it."""
    return f"{body['session_id']}:train:{body['model_seq_id']}"


def sampling_session(body: Body, config: Config) -> str:
    """Returns the id of a sampling session, which holds the name of its weights."""
    begin = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
    if path := body.get("model_path"):
        return f"{begin}{_OF}{path}"
    _check_model(body, config)
    return f"{begin}{_OF}"


def weights_of(session: str) -> str:
    """Returns the name of the weights of a sampling session, which is its own for a publish."""
    _, of, name = session.partition(_OF)
    return name if of else session


def create_model(body: Body, config: Config) -> pb.Operation:
    """Returns the operation of create_model."""
    _check_model(body, config)
    asked, lora, begin = body.get("lora_config"), config.lora, pb.Begin()
    # The SDK has no word for training the whole model; `create_session` has told of it.
    if not lora.rank:
        return _first(body, "create_model", begin=begin)
    if asked is None:
        raise Refused(f"this run trains an adapter of rank {lora.rank}, not the whole model")
    rank, parts = int(asked["rank"]), {"train_attn": ATTENTION, "train_mlp": MLP}
    left_out = {name for key, of in parts.items() if not asked.get(key, True) for name in of}
    modules = ", ".join(lora.modules)
    targets = [name for name in lora.modules if name not in left_out]
    if not targets:
        raise Refused(f"nothing is trained: lora.target_modules has {modules}")
    if lora.adapters:
        if not 1 <= rank <= lora.rank:
            raise Refused(f"an adapter has a rank of 1 to {lora.rank} (lora.rank), got {rank}")
        alpha = (body.get("user_metadata") or {}).get(ALPHA, lora.alpha)
        begin.adapter.rank, begin.adapter.alpha = rank, float(alpha)
        seed = asked.get("seed")
        begin.values.seed = config.run.seed if seed is None else seed
        begin.values.targets.extend(targets)
    elif rank != lora.rank:
        raise Refused(
            f"this run trains an adapter of rank {lora.rank} (lora.rank), not an adapter of rank "
            f"{rank}"
        )
    elif targets != list(lora.modules):
        raise Refused(
            f"this run trains {modules} (lora.target_modules), not {' and '.join(targets)} alone, "
            "which a model of lora.adapters can"
        )
    return _first(body, "create_model", begin=begin)


def load_weights(body: Body) -> pb.Operation:
    """Returns the operation of load_weights, of a model or as the first of a new one."""
    load = pb.Load(name=body["path"], without_optimizer=not body["optimizer"])
    if load.without_optimizer and load.name.endswith("/newest"):
        raise Refused(f"{load.name} goes on with its optimizer: load it with the optimizer")
    if body.get("model_id") is None:
        return _first(body, "load_weights", load=load)
    _check_optimizer(body)
    return _operation(str(body["model_id"]), int(body["seq_id"]), "load_weights", load=load)


def forward_backward(request: wire.ForwardBackwardRequest) -> pb.Operation:
    """Returns the operation of forward_backward, or of forward."""
    name, numbers = request.loss_fn, dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise Refused(f"loss_fn_config has {key} = {value.text!r}; all settings are numbers")
        numbers[key] = value.number
    if name not in LOSSES:
        raise Refused(f"loss_fn {name} is not served; there are {', '.join(LOSSES)}")
    loss, fixed, settings = LOSSES[name]
    if strange := sorted(numbers.keys() - settings.keys()):
        raise Refused(f"loss_fn {name} has no setting {strange[0]}")
    own = dict(settings[key](value) for key, value in numbers.items())
    operation = _operation(request.model_id, request.seq_id, "forward_backward")
    # In its place: a message that is put into another one is copied.
    compute = operation.compute
    compute.id, compute.backward = operation.id, not request.forward_only
    compute.loss, compute.loss_args_json = loss, json.dumps(fixed | own)
    for place, datum in enumerate(request.data):
        compute.sequences.add(**_sequence(place, datum, name))
    return operation


def _sequence(place: int, datum: wire.Datum, loss_fn: str) -> dict[str, bytes]:
    if not all(chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise Refused(f"datum {place} has an image or sound; this server takes text")
    known = ["target_tokens", "advantages", "logprobs"]
    if loss_fn == "cross_entropy":
        known = ["target_tokens", "weights"]
    advantages = known[1]
    arrays = {}
    for name, tensor in datum.loss_fn_inputs.items():
        if name not in known:
            raise Refused(f"datum {place}: loss_fn {loss_fn} has no input {name}")
        if tensor.dtype not in _DTYPES or tensor.sparse_csr or len(tensor.shape) > 1:
            raise Refused(f"datum {place}: {name} must be a dense tensor of one dimension")
        arrays[name] = np.frombuffer(tensor.dense, dtype=_DTYPES[tensor.dtype])
    for name in known:
        if name not in arrays:
            raise Refused(f"datum {place}: loss_fn {loss_fn} needs {name}")
    targets, behavior = arrays["target_tokens"], arrays.get("logprobs")
    if targets.dtype.kind != "i":
        raise Refused(f"datum {place}: target_tokens must be integers")
    if strange := targets[(targets < 0) | (targets >= _TOKENS)].tolist():
        raise Refused(
            f"datum {place}: target_tokens has {strange[0]}, which is no token; {advantages} of 0 "
            "leave a token out"
        )
    if behavior is not None and np.isnan(behavior).any():
        raise Refused(
            f"datum {place}: logprobs has NaN, as replies have that were sampled with top_p below "
            "1 or top_k above 0: theirs would be of a part of the vocabulary, and loss_fn "
            f"{loss_fn} compares with the whole; sample what is trained with top_p = 1"
        )
    return {
        "token_ids": b"".join(chunk.encoded_text.tokens for chunk in datum.model_input),
        "targets": targets.astype("<u4").tobytes(),
        "advantages": arrays[advantages].astype("<f4").tobytes(),
        "behavior_logprobs": b"" if behavior is None else behavior.astype("<f4").tobytes(),
    }


def optim_step(body: Body) -> pb.Operation:
    """Returns the operation of optim_step."""
    given = body.get("adam_params")
    if given is None:
        raise Refused("this server has Adam only (adam_params)")
    for name, value in given.items():
        # JSON of the SDK has null for what is not finite.
        if value is None:
            raise Refused(f"adam_params.{name} must be a finite number")
        # Adam divides by 1 - beta ** step, and by eps where no gradient was yet.
        if name.startswith("beta") and value >= 1.0:
            raise Refused(f"adam_params.{name} must be below 1, got {value}")
        if name == "eps" and np.float32(value) == 0.0:
            raise Refused(f"adam_params.eps must be above 0 in float32, got {value}")
    numbers = trainer_pb2.AdamNumbers(
        learning_rate=given.get("learning_rate", 1e-4),
        beta1=given.get("beta1", 0.9),
        beta2=given.get("beta2", 0.95),
        eps=given.get("eps", 1e-12),
        weight_decay=given.get("weight_decay", 0.0),
        max_grad_norm=max(0.0, given.get("grad_clip_norm", 0.0)),
    )
    return _operation(body["model_id"], body["seq_id"], "optim_step", step=numbers)


def save(kind: str, body: Body, *, in_flight: bool = False) -> pb.Operation:
    """Returns the publish of save_weights_for_sampler, or the checkpoint of another of `SAVES`.

    Each publish may be said to be `in_flight`.
    """
    if body.get("age_encryption_recipients"):
        raise Refused("files are not encrypted here: leave age_encryption_recipients out")
    model, number, path, kept = str(body["model_id"]), body["seq_id"], body.get("path"), _kept(body)
    if kind != "save_weights_for_sampler":
        saved = pb.Save(name=f"tinker://{model}/{SAVES[kind]}/{path or f'step-{number}'}")
        return _operation(model, number, kind, save=saved, kept=kept)
    name = f"tinker://{model}/{SAVES[kind]}/{path}"
    if body.get("kind") == "inflight":
        # One target of all publishes of the model; each of them makes a session.
        name, in_flight = f"{model}{_IN_FLIGHT}", True
    elif path is None:
        name = f"{model.partition(':')[0]}:sample:{body['sampling_session_seq_id']}"
    publish = pb.Publish(name=name, in_flight=in_flight)
    return _operation(model, number, kind, publish=publish, kept=kept)


def keep(method: str, path: str, body: Body) -> pb.KeepRequest:
    """Returns what a DELETE of a checkpoint's path, or a PUT of its ttl, asks for."""
    match method, path.split("/"):
        case "DELETE", ["training_runs", model, "checkpoints", kind, name]:
            kept = pb.Kept(is_deleted=True)
        case "PUT", ["training_runs", model, "checkpoints", kind, name, "ttl"]:
            kept = _kept(body)
        case _:
            raise Refused(
                f"{method} {path} is not served: a checkpoint can be deleted and have another ttl; "
                "it is not published, since all clients of this server load it by its path"
            )
    return pb.KeepRequest(name=f"tinker://{model}/{kind}/{name}", kept=kept)


def refused(model: str, number: int, kind: str, cause: str) -> pb.Operation:
    """Returns an operation that fails in its turn, so that later ones have theirs."""
    return _operation(model, number, kind, refused=pb.Refused(cause=cause))


def sample(body: Body, config: Config, vocabulary: int) -> pb.Operation:
    """Returns the operation of asample; `vocabulary` is 0 if it is unknown."""
    session = body.get("sampling_session_id")
    if session is None:
        raise Refused("a sample needs a sampling session: create_sampling_client makes one")
    for name in _UNSERVED:
        if body.get(name):
            raise Refused(f"{name} is not served; prompt_logprobs has those of the whole prompt")
    prompt: list[int] = []
    for chunk in body["prompt"]["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused(f"a prompt is text here, got a chunk of type {chunk['type']}")
        prompt += chunk["tokens"]
    if not prompt:
        raise Refused("a prompt has one token at least, got none")
    tokens = np.asarray(prompt)
    if tokens.dtype.kind not in "iu" or tokens.ndim > 1:
        raise Refused("a prompt is a list of token ids")
    if strange := tokens[(tokens < 0) | (tokens >= (vocabulary or _TOKENS))].tolist():
        raise Refused(f"a prompt has token {strange[0]}, the vocabulary has {vocabulary}")
    asked, sampling = body.get("sampling_params") or {}, config.sampling.to_pb()
    if (seed := asked.get("seed")) is not None:
        if not 0 <= seed <= _LARGEST_SEED:
            raise Refused(f"a seed is a number from 0 to {_LARGEST_SEED}, got {seed}")
        sampling.seed = seed
    most = min(config.sampling.max_reply_tokens, config.sampling.max_episode_tokens - len(prompt))
    wanted = most if asked.get("max_tokens") is None else asked["max_tokens"]
    if not 1 <= wanted <= most:
        raise Refused(
            f"a prompt of {len(prompt)} tokens leaves room for {max(0, most)} of a reply, got "
            f"max_tokens = {wanted}: set sampling.max_reply_tokens and sampling.max_episode_tokens"
        )
    sampling.max_reply_tokens = wanted
    sampling.temperature = asked.get("temperature", 1.0)
    sampling.top_p, sampling.top_k = asked.get("top_p", 1.0), max(0, asked.get("top_k", -1))
    sampling.prompt_logprobs = bool(body.get("prompt_logprobs"))
    del sampling.stop[:], sampling.stop_token_ids[:]
    stop = asked.get("stop")
    sampling.ignore_eos = stop == []
    for each in [stop] if isinstance(stop, str) else stop or ():
        if isinstance(each, str):
            sampling.stop.append(each)
        else:
            sampling.stop_token_ids.append(each)
    if "" in sampling.stop or not sampling.top_p:
        raise Refused("a text in stop has a character at least, and top_p is above 0")
    return pb.Operation(
        id=f"{session}:{body['seq_id']}:sample",
        sample=pb.Sample(
            prompt_token_ids=tokens.astype("<u4").tobytes(),
            num_samples=body.get("num_samples", 1),
            sampling=sampling,
            name=weights_of(session),
        ),
    )


def sampled(result: pb.OperationResult) -> wire.SampleResponse:
    """Returns the answer to asample."""
    found = result.samples[0].prompt_logprobs if result.samples else b""
    return wire.SampleResponse(
        prompt_logprobs=_NOT_A_NUMBER + found if found else None,
        sequences=[
            wire.SampledSequence(
                stop_reason=wire.LENGTH if one.truncated else wire.STOP,
                tokens=one.token_ids,
                logprobs=one.logprobs,
            )
            for one in result.samples
        ],
    )


def computed(result: pb.OperationResult) -> wire.ForwardBackwardOutput:
    """Returns the answer to forward_backward."""
    found = result.compute
    ends = np.cumsum([0, *map(len, found.logprobs)], dtype="<i8")
    logprobs = wire.BatchedTensor(
        data=b"".join(found.logprobs), offsets=ends.tobytes(), dtype=wire.FLOAT32
    )
    record = wire.ArrayRecord(fields={"logprobs": logprobs}, num_datums=len(found.logprobs))
    return wire.ForwardBackwardOutput(
        loss_fn_output_type="TensorData", loss_fn_outputs=[record], metrics=found.metrics
    )


def answer(request_id: str, result: pb.OperationResult) -> dict[str, Any]:
    """Returns the answer to all other operations; the SDK reads the fields of its kind."""
    model, _, kind = request_id.rpartition(":")
    name = result.name
    where = "path" if name.startswith("tinker://") else "sampling_session_id"
    if name.endswith(_IN_FLIGHT):
        name = f"{model}{_OF}{name}"
    found = {"type": kind, "model_id": model.rpartition(":")[0], "metrics": dict(result.metrics)}
    return found | ({where: name} if name else {})


def _first(body: Body, kind: str, **operation: Any) -> pb.Operation:  # noqa: ANN401
    """Returns the first operation of a new model, with what its client says of the model."""
    _check_optimizer(body)
    metadata = body.get("user_metadata") or {}
    if (asked := metadata.get(MAX_STALENESS)) is not None:
        if not re.fullmatch("[0-9]{1,6}", str(asked)):
            raise Refused(f"{MAX_STALENESS} is a number of steps from 0 to 999999, got {asked!r}")
        operation[MAX_STALENESS] = int(asked)
    return _operation(training_run(body), 0, kind, user_metadata=metadata, **operation)


def _operation(model: str, number: int, kind: str, **operation: Any) -> pb.Operation:  # noqa: ANN401
    return pb.Operation(id=f"{model}:{number}:{kind}", stream=model, number=number, **operation)


def _kept(body: Body) -> pb.Kept:
    """Returns how long what is saved holds."""
    ttl_s = body.get("ttl_seconds")
    if ttl_s is None:
        return pb.Kept()
    if not 0 < ttl_s < _MAX_TTL_S:
        raise Refused(f"ttl_seconds is between 0 and {_MAX_TTL_S}, got {ttl_s}")
    return pb.Kept(until_unix_s=time.time() + ttl_s)


def _check_model(body: Body, config: Config) -> None:
    path, name = config.model.path, body.get("base_model")
    if name not in (str(path), path.name):
        raise Refused(f"this server has {path} only, not {name}")


def _check_optimizer(body: Body) -> None:
    asked = body.get("optimizer_config")
    if asked is not None and asked.get("type", "adamw") != "adamw":
        raise Refused(f"this server has the optimizer adamw only, not {asked['type']}")
