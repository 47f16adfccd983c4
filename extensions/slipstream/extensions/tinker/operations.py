"""What requests of the Tinker API mean as operations, and results as its answers; no I/O.

Identities come from the client's own numbers, so that a request that is sent twice is one
operation, and the HTTP process needs no memory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ATTENTION, MLP
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.v1 import fleet_pb2, trainer_pb2
from slipstream.v1 import operations_pb2 as pb

OWN = "slipstream.extensions.tinker.trainer"
# The loss of each loss_fn: its name, its fixed arguments, and the argument of each of its settings
# with the number that the setting is subtracted from, or that is subtracted from it.
_CLIPPED = {"ratio": "behavior"}
LOSSES: Mapping[str, tuple[str, dict[str, str]]] = {
    "cross_entropy": ("reinforce", {}),
    "importance_sampling": (f"{OWN}:importance_sampling", {}),
    "ppo": ("ppo", _CLIPPED),
    "cispo": ("cispo", _CLIPPED),
    "gspo": ("gspo", _CLIPPED),
    "dro": (f"{OWN}:dro", {}),
}
_INPUTS = {"cross_entropy": ("weights", None)}
_RL_INPUTS = ("advantages", "logprobs")
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
_NAME = re.compile(r"[A-Za-z0-9._:/+-]{1,200}")
# The key of a model's metadata that has its alpha, which the SDK has no word for.
ALPHA = "lora_alpha"
# The key that has the most steps behind which its replies may be.
MAX_STALENESS = "max_staleness"
# Stands between the id of a sampling session and the name of its weights.
_OF = "+"
# Ends the name of weights that every publish in flight of a model replaces.
_IN_FLIGHT = ":inflight"


class Refused(ValueError):
    """Raised for a request that this server does not carry out; the text names what can."""


class NotReady(Exception):
    """Raised for a request that is to be sent again: the controller or a file is not there yet."""


def training_run(body: Mapping[str, Any]) -> str:
    """Returns the id of the model that a request creates, as the SDK makes it."""
    return f"{body['session_id']}:train:{body['model_seq_id']}"


def sampling_session(body: Mapping[str, Any], config: Config) -> str:
    """Returns the id of a sampling session, which holds the name of its weights."""
    begin = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
    if path := body.get("model_path"):
        return f"{begin}{_OF}{_checked_name(path)}"
    check_model(body.get("base_model"), config)
    return f"{begin}{_OF}"


def weights_of(session: str) -> str:
    """Returns the name of the weights of a sampling session, which is its own for a publish."""
    _, of, name = session.partition(_OF)
    return name if of else session


def check_model(name: str | None, config: Config) -> None:
    """Raises Refused unless `name` is the run's model."""
    path = config.model.path
    if name not in (str(path), path.name):
        raise Refused(f"this server has {path} only, not {name}")


def create_model(body: Mapping[str, Any], config: Config) -> pb.Operation:
    """Returns the operation of create_model."""
    check_model(body.get("base_model"), config)
    asked, lora = body.get("lora_config"), config.lora
    # The SDK has no word for training the whole model; `create_session` has told of it.
    if lora.rank and not lora.adapters:
        if asked is None or asked["rank"] != lora.rank:
            wanted = "the whole model" if asked is None else f"an adapter of rank {asked['rank']}"
            raise Refused(
                f"this run trains an adapter of rank {lora.rank} (lora.rank), not {wanted}"
            )
        if (targets := _targets(asked, config)) != list(lora.modules):
            raise Refused(
                f"this run trains {', '.join(lora.modules)} (lora.target_modules), not "
                f"{' and '.join(targets)} alone, which a model of lora.adapters can"
            )
    _check_optimizer(body.get("optimizer_config"))
    model = training_run(body)
    begin = _begin(body, config) if lora.adapters else pb.Begin()
    return pb.Operation(id=f"{model}:0:create_model", stream=model, begin=begin, **_said(body))


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new model's metadata, and the bound on staleness that they ask for."""
    metadata = body.get("user_metadata") or {}
    found: dict[str, Any] = {"user_metadata": metadata}
    if (asked := metadata.get(MAX_STALENESS)) is not None:
        if not re.fullmatch("[0-9]{1,6}", str(asked)):
            raise Refused(f"{MAX_STALENESS} is a number of steps from 0 to 999999, got {asked!r}")
        found[MAX_STALENESS] = int(asked)
    return found


def _begin(body: Mapping[str, Any], config: Config) -> pb.Begin:
    """Returns how one of several adapters begins."""
    asked, lora = body["lora_config"], config.lora
    rank = int(asked["rank"])
    if not 1 <= rank <= lora.rank:
        raise Refused(f"an adapter has a rank of 1 to {lora.rank} (lora.rank), got {rank}")
    alpha = (body.get("user_metadata") or {}).get(ALPHA)
    targets = _targets(asked, config)
    seed = asked.get("seed")
    return pb.Begin(
        adapter=trainer_pb2.Adapter(rank=rank, alpha=lora.alpha if alpha is None else float(alpha)),
        values=trainer_pb2.NewAdapter(
            seed=config.run.seed if seed is None else seed, targets=targets
        ),
    )


def _targets(asked: Mapping[str, Any], config: Config) -> list[str]:
    """Returns the matrices of `lora.target_modules` that a client wants to train."""
    parts, modules = {"train_attn": ATTENTION, "train_mlp": MLP}, config.lora.modules
    left_out = {name for key, of in parts.items() if not asked.get(key, True) for name in of}
    targets = [name for name in modules if name not in left_out]
    if not targets:
        raise Refused(f"nothing is trained: lora.target_modules has {', '.join(modules)}")
    return targets


def finish(session: str) -> pb.Operation:
    """Returns the operation of the end of a session."""
    return pb.Operation(id=f"{session}:finish", stream=session, finish=pb.Finish())


def load_weights(body: Mapping[str, Any]) -> pb.Operation:
    """Returns the operation of load_weights, of a model or as the first of a new one."""
    has_model = body.get("model_id") is not None
    model = str(body["model_id"]) if has_model else training_run(body)
    number = int(body["seq_id"]) if has_model else 0
    _check_optimizer(body.get("optimizer_config"))
    load = pb.Load(name=_checked_name(body["path"]), without_optimizer=not body["optimizer"])
    if load.without_optimizer and load.name.endswith("/newest"):
        raise Refused(f"{load.name} goes on with its optimizer: load it with the optimizer")
    own = {} if has_model else _said(body)
    return _operation(model, number, "load_weights", load=load, **own)


def forward_backward(request: wire.ForwardBackwardRequest) -> pb.Operation:
    """Returns the operation of forward_backward, or of forward."""
    config = {name: value for name, value in request.loss_fn_config.items()}
    for name, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise Refused(f"loss_fn_config has {name} = {value.text!r}; all settings are numbers")
        config[name] = value.number
    loss, arguments = _loss(request.loss_fn, config)
    sequences = [
        _sequence(place, datum, request.loss_fn) for place, datum in enumerate(request.data)
    ]
    compute = trainer_pb2.Pass(
        id=f"{request.model_id}:{request.seq_id}:forward_backward",
        backward=not request.forward_only,
        loss=loss,
        loss_args_json=json.dumps(arguments),
        sequences=sequences,
    )
    return _operation(request.model_id, request.seq_id, "forward_backward", compute=compute)


def optim_step(body: Mapping[str, Any]) -> pb.Operation:
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


def save_weights_for_sampler(body: Mapping[str, Any], *, in_flight: bool = False) -> pb.Operation:
    """Returns the publish of save_weights_for_sampler; each may be said to be `in_flight`."""
    model, path = str(body["model_id"]), body.get("path")
    if body.get("kind") == "inflight":
        in_flight = True
        # One target of all publishes of the model; each of them makes a session.
        name = f"{model}{_IN_FLIGHT}"
    elif path is None:
        session = model.partition(":")[0]
        name = f"{session}:sample:{body['sampling_session_seq_id']}"
    else:
        name = _checked_name(f"tinker://{model}/sampler_weights/{path}")
    publish = pb.Publish(name=name, in_flight=in_flight)
    return _operation(
        model, body["seq_id"], "save_weights_for_sampler", publish=publish, kept=_kept(body)
    )


def save_weights(body: Mapping[str, Any], kind: str = "weights") -> pb.Operation:
    """Returns the checkpoint of save_weights.

    With the kind "external_weights" it is that of save_weights_external, whose files the REST calls
    export.
    """
    if body.get("age_encryption_recipients"):
        raise Refused("files are not encrypted here: leave age_encryption_recipients out")
    model, path = str(body["model_id"]), body.get("path") or f"step-{body['seq_id']}"
    save = pb.Save(name=_checked_name(f"tinker://{model}/{kind}/{path}"))
    name = "save_weights" if kind == "weights" else "save_weights_external"
    return _operation(model, body["seq_id"], name, save=save, kept=_kept(body))


def keep(method: str, path: str, body: Mapping[str, Any]) -> pb.KeepRequest:
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
    return pb.KeepRequest(name=_checked_name(f"tinker://{model}/{kind}/{name}"), kept=kept)


def _kept(body: Mapping[str, Any]) -> pb.Kept:
    """Returns how long what is saved holds."""
    ttl_s = body.get("ttl_seconds")
    if ttl_s is None:
        return pb.Kept()
    if not 0 < ttl_s < _MAX_TTL_S:
        raise Refused(f"ttl_seconds is between 0 and {_MAX_TTL_S}, got {ttl_s}")
    return pb.Kept(until_unix_s=time.time() + ttl_s)


def refused(model: str, number: int, kind: str, cause: str) -> pb.Operation:
    """Returns an operation that fails in its turn, so that later ones have theirs."""
    return _operation(model, number, kind, refused=pb.Refused(cause=cause))


def sample(body: Mapping[str, Any], config: Config, vocabulary: int) -> pb.Operation:
    """Returns the operation of asample; `vocabulary` is 0 if it is unknown."""
    session = body.get("sampling_session_id")
    if session is None:
        raise Refused("a sample needs a sampling session: create_sampling_client makes one")
    for name in _UNSERVED:
        if body.get(name):
            raise Refused(f"{name} is not served; prompt_logprobs has those of the whole prompt")
    prompt = [token for chunk in body["prompt"]["chunks"] for token in _tokens(chunk)]
    if strange := [token for token in prompt if not 0 <= token < (vocabulary or _TOKENS)]:
        raise Refused(f"a prompt has token {strange[0]}, the vocabulary has {vocabulary}")
    settings = _sampling(body.get("sampling_params") or {}, config, len(prompt))
    settings.prompt_logprobs = bool(body.get("prompt_logprobs"))
    return pb.Operation(
        id=f"{session}:{body['seq_id']}:sample",
        sample=pb.Sample(
            prompt_token_ids=np.asarray(prompt, dtype="<u4").tobytes(),
            num_samples=body.get("num_samples", 1),
            sampling=settings,
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


def _operation(model: str, number: int, kind: str, **operation: Any) -> pb.Operation:  # noqa: ANN401
    return pb.Operation(id=f"{model}:{number}:{kind}", stream=model, number=number, **operation)


def _checked_name(path: str) -> str:
    if not _NAME.fullmatch(path):
        raise Refused(f"a path has letters, digits and . _ : / + -, at most 200, got {path[:80]!r}")
    return path


def _check_optimizer(asked: Mapping[str, Any] | None) -> None:
    if asked is not None and asked.get("type", "adamw") != "adamw":
        raise Refused(f"this server has the optimizer adamw only, not {asked['type']}")


def _loss(name: str, config: Mapping[str, float]) -> tuple[str, dict[str, float | str]]:
    if name not in LOSSES:
        raise Refused(f"loss_fn {name} is not served; there are {', '.join(LOSSES)}")
    loss, fixed = LOSSES[name]
    found: dict[str, float | str] = dict(fixed)
    for key, value in config.items():
        if key == "clip_low_threshold" and fixed:
            found["clip_low"] = 1.0 - value
        elif key == "clip_high_threshold" and fixed:
            found["clip_high"] = value - 1.0
        elif key == "beta" and name == "dro":
            found["beta"] = value
        else:
            raise Refused(f"loss_fn {name} has no setting {key}")
    return loss, found


def _sequence(place: int, datum: wire.Datum, loss_fn: str) -> trainer_pb2.PassSequence:
    tokens = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise Refused(f"datum {place} has an image or sound; this server takes text")
        tokens.append(chunk.encoded_text.tokens)
    advantages, behavior = _INPUTS.get(loss_fn, _RL_INPUTS)
    known = {"target_tokens", advantages, behavior}
    if strange := sorted(datum.loss_fn_inputs.keys() - known):
        raise Refused(f"datum {place}: loss_fn {loss_fn} has no input {strange[0]}")
    arrays = {name: _array(place, name, one) for name, one in datum.loss_fn_inputs.items()}
    for name in sorted(filter(None, known)):
        if name not in arrays:
            raise Refused(f"datum {place}: loss_fn {loss_fn} needs {name}")
    targets = arrays["target_tokens"]
    if targets.dtype.kind != "i":
        raise Refused(f"datum {place}: target_tokens must be integers")
    if strange := targets[(targets < 0) | (targets >= _TOKENS)].tolist():
        raise Refused(
            f"datum {place}: target_tokens has {strange[0]}, which is no token; {advantages} of 0 "
            "leave a token out"
        )
    return trainer_pb2.PassSequence(
        token_ids=b"".join(tokens),
        targets=targets.astype("<u4").tobytes(),
        advantages=arrays[advantages].astype("<f4").tobytes(),
        behavior_logprobs=b"" if behavior is None else arrays[behavior].astype("<f4").tobytes(),
    )


def _array(place: int, name: str, tensor: wire.Tensor) -> npt.NDArray[Any]:
    if tensor.dtype not in _DTYPES or tensor.sparse_csr or len(tensor.shape) > 1:
        raise Refused(f"datum {place}: {name} must be a dense tensor of one dimension")
    return np.frombuffer(tensor.dense, dtype=_DTYPES[tensor.dtype])


def _tokens(chunk: Mapping[str, Any]) -> list[int]:
    if chunk.get("type", "encoded_text") != "encoded_text":
        raise Refused(f"a prompt is text here, got a chunk of type {chunk['type']}")
    found: list[int] = chunk["tokens"]
    return found


def _sampling(asked: Mapping[str, Any], config: Config, prompt: int) -> fleet_pb2.SamplingSettings:
    settings = config.sampling.to_pb()
    if (seed := asked.get("seed")) is not None:
        if not 0 <= seed <= _LARGEST_SEED:
            raise Refused(f"a seed is a number from 0 to {_LARGEST_SEED}, got {seed}")
        settings.seed = seed
    most = min(config.sampling.max_reply_tokens, config.sampling.max_episode_tokens - prompt)
    wanted = asked.get("max_tokens")
    if not prompt:
        raise Refused("a prompt has one token at least, got none")
    if most < 1 or (wanted or 0) > most:
        raise Refused(
            f"a prompt of {prompt} tokens leaves room for {max(0, most)} of a reply, got "
            f"max_tokens = {wanted}: set sampling.max_reply_tokens and sampling.max_episode_tokens"
        )
    settings.max_reply_tokens = most if wanted is None else wanted
    settings.temperature = asked.get("temperature", 1.0)
    settings.top_p, settings.top_k = asked.get("top_p", 1.0), max(0, asked.get("top_k", -1))
    del settings.stop[:], settings.stop_token_ids[:]
    stop = asked.get("stop")
    settings.ignore_eos = stop == []
    for each in [stop] if isinstance(stop, str) else stop or ():
        if isinstance(each, str):
            settings.stop.append(each)
        else:
            settings.stop_token_ids.append(each)
    return settings
