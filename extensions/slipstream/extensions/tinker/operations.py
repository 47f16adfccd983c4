"""What requests of the Tinker API mean as operations, and results as its answers; no I/O.

Identities come from the client's own numbers, so that a request that is sent twice is one
operation, and the HTTP process needs no memory.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import ATTENTION, MLP
from slipstream.extensions.tinker import wire_pb2 as wire
from slipstream.extensions.tinker.contract import checked
from slipstream.extensions.tinker.request_fields import Body, Refused, number, whole_number
from slipstream.extensions.tinker.requested_passes import MAX_TOKENS
from slipstream.v1 import fleet_pb2, trainer_pb2
from slipstream.v1 import operations_pb2 as pb

_NOT_A_NUMBER = np.float32(np.nan).tobytes()
# The largest seed of a sample; each further reply to its prompt has the next number.
_LARGEST_SEED = 1 << 52
_LARGEST_TTL_S = 1e10
_MAX_SAMPLES = 65536
# The key of a model's metadata that has its alpha, which the SDK has no word for.
ALPHA = "lora_alpha"
# The key that has the most steps behind which its replies may be.
MAX_STALENESS = "max_staleness"
# The largest number of each of Adam's; the least is 0.
_LARGEST_ADAM: Mapping[str, float] = {
    "learning_rate": 1e6,
    "beta1": 1.0,
    "beta2": 1.0,
    "eps": 1e6,
    "weight_decay": 1e6,
}
_LARGEST_NORM = 1e18
# Stands between the id of a sampling session and the name of its weights.
_OF = "+"
# Ends the name of weights that every publish in flight of a model replaces.
_IN_FLIGHT = ":inflight"
# The calls that save: the SDK's type of the request, and the kind of path under which others find
# what it saves. The REST calls export the files of external weights.
SAVES: Mapping[str, tuple[str, str]] = {
    "save_weights": ("SaveWeightsRequest", "weights"),
    "save_weights_external": ("SaveWeightsExternalRequest", "external_weights"),
    "save_weights_for_sampler": ("SaveWeightsForSamplerRequest", "sampler_weights"),
}


def training_run(body: Body) -> str:
    """Returns the id of the model that a request creates, as the SDK makes it."""
    return f"{body['session_id']}:train:{body['model_seq_id']}"


def sampling_session(body: Body, config: Config) -> str:
    """Returns the id of a sampling session, which holds the name of its weights."""
    fields = checked("CreateSamplingSessionRequest", body)
    session = f"{fields['session_id']}:sample:{fields['sampling_session_seq_id']}"
    if fields["model_path"]:
        return f"{session}{_OF}{fields['model_path']}"
    _check_model(fields["base_model"], config)
    return f"{session}{_OF}"


def weights_of(session: str) -> str:
    """Returns the name of the weights of a sampling session, which is its own for a publish."""
    _, of, name = session.partition(_OF)
    return name if of else session


def create_model(body: Body, config: Config) -> pb.Operation:
    """Returns the operation of create_model."""
    fields = checked("CreateModelRequest", body)
    _check_model(fields["base_model"], config)
    lora = config.lora
    begin = pb.Begin()
    # The SDK has no word for training the whole model; `create_session` has told of it.
    if not lora.rank:
        return _first(fields, "create_model", begin=begin)
    if fields["lora_config"] is None:
        raise Refused(f"this run trains an adapter of rank {lora.rank}, not the whole model")
    adapter = checked("LoraConfig", fields["lora_config"])
    rank = whole_number("lora_config.rank", adapter["rank"], lowest=0, highest=1 << 16)
    targets = _targets(adapter, config)
    if lora.adapters:
        if not 1 <= rank <= lora.rank:
            raise Refused(f"an adapter has a rank of 1 to {lora.rank} (lora.rank), got {rank}")
        begin.adapter.rank = rank
        begin.adapter.alpha = _alpha(fields["user_metadata"] or {}, lora.alpha)
        seed = adapter["seed"]
        begin.values.seed = config.run.seed if seed is None else seed
        begin.values.targets.extend(targets)
    elif rank != lora.rank:
        raise Refused(
            f"this run trains an adapter of rank {lora.rank} (lora.rank), not an adapter of rank "
            f"{rank}"
        )
    elif targets != list(lora.modules):
        raise Refused(
            f"this run trains {', '.join(lora.modules)} (lora.target_modules), not "
            f"{' and '.join(targets)} alone, which a model of lora.adapters can"
        )
    return _first(fields, "create_model", begin=begin)


def _targets(adapter: Body, config: Config) -> list[str]:
    """Returns the matrices of the run's adapters that a client wants to train."""
    modules = config.lora.modules
    left_out: set[str] = set()
    if not adapter["train_attn"]:
        left_out |= set(ATTENTION)
    if not adapter["train_mlp"]:
        left_out |= set(MLP)
    targets = [name for name in modules if name not in left_out]
    if not targets:
        raise Refused(f"nothing is trained: lora.target_modules has {', '.join(modules)}")
    return targets


def _alpha(metadata: Body, default: float) -> float:
    value = metadata.get(ALPHA, default)
    try:
        alpha = float(value)
    except ValueError:
        alpha = -1.0
    if not 0.0 < alpha <= 1e6:
        raise Refused(f"{ALPHA} is a number above 0, at most 1e6, got {value!r}")
    return alpha


def load_weights(body: Body, config: Config) -> pb.Operation:
    """Returns the operation of load_weights, of a model or as the first of a new one."""
    fields = checked("LoadWeightsRequest", body)
    load = pb.Load(name=fields["path"], without_optimizer=not fields["optimizer"])
    if load.without_optimizer and load.name.endswith("/newest"):
        raise Refused(f"{load.name} goes on with its optimizer: load it with the optimizer")
    if fields["base_model"] is not None:
        _check_model(fields["base_model"], config)
    if fields["model_id"] is None:
        return _first(fields, "load_weights", load=load)
    _check_optimizer(fields)
    return _operation(str(fields["model_id"]), int(fields["seq_id"]), "load_weights", load=load)


def optim_step(body: Body) -> pb.Operation:
    """Returns the operation of optim_step."""
    fields = checked("OptimStepRequest", body)
    values = checked("AdamParams", fields["adam_params"])
    adam = {
        name: number(f"adam_params.{name}", values[name], lowest=0.0, highest=highest)
        for name, highest in _LARGEST_ADAM.items()
    }
    for name in ("beta1", "beta2"):
        # Adam divides by 1 - beta ** step.
        if adam[name] >= 1.0:
            raise Refused(f"adam_params.{name} must be below 1, got {adam[name]}")
    # Adam divides by eps where no gradient was yet.
    if np.float32(adam["eps"]) == 0.0:
        raise Refused(f"adam_params.eps must be above 0 in float32, got {adam['eps']}")
    norm = number(
        "adam_params.grad_clip_norm",
        values["grad_clip_norm"],
        lowest=-_LARGEST_NORM,
        highest=_LARGEST_NORM,
    )
    numbers = trainer_pb2.AdamNumbers(**adam, max_grad_norm=max(0.0, norm))
    return _operation(fields["model_id"], fields["seq_id"], "optim_step", step=numbers)


def save(kind: str, body: Body, *, in_flight: bool = False) -> pb.Operation:
    """Returns the publish of save_weights_for_sampler, or the checkpoint of another of `SAVES`.

    Each publish may be said to be `in_flight`.
    """
    request, folder = SAVES[kind]
    fields = checked(request, body)
    model = str(fields["model_id"])
    sequence = fields["seq_id"]
    path = fields["path"]
    operation = _operation(model, sequence, kind, kept=_kept(fields["ttl_seconds"]))
    operation.user_metadata.update(_texts(fields.get("user_metadata")))
    if kind != "save_weights_for_sampler":
        operation.save.name = f"tinker://{model}/{folder}/{path or f'step-{sequence}'}"
        # Requests of external weights have no such field; their files are exported anew.
        operation.save.may_replace = bool(fields.get("overwrite", True))
        return operation
    name = f"tinker://{model}/{folder}/{path}"
    if fields["kind"] == "inflight":
        # All publishes of the model have one target; each of them makes a session.
        name = f"{model}{_IN_FLIGHT}"
        in_flight = True
    elif fields["kind"] != "snapshot":
        raise Refused(f"kind is snapshot or inflight, got {fields['kind']!r}")
    elif path is None:
        name = f"{model.partition(':')[0]}:sample:{fields['sampling_session_seq_id']}"
    operation.publish.name = name
    operation.publish.in_flight = in_flight
    return operation


def keep(method: str, path: str, body: Body) -> pb.KeepRequest:
    """Returns what a DELETE of a checkpoint's path, or a PUT of its ttl, asks for."""
    match method, path.split("/"):
        case "DELETE", ["training_runs", model, "checkpoints", kind, name]:
            change = pb.Kept(is_deleted=True)
        case "PUT", ["training_runs", model, "checkpoints", kind, name, "ttl"]:
            change = _kept(body.get("ttl_seconds"))
        case _:
            raise Refused(
                f"{method} {path} is not served: a checkpoint can be deleted and have another ttl; "
                "it is not published, since it is loaded by the api_key that saved it"
            )
    return pb.KeepRequest(name=f"tinker://{model}/{kind}/{name}", kept=change)


def refused(model: str, sequence: int, kind: str, cause: str) -> pb.Operation:
    """Returns an operation that fails in its turn, so that later ones have theirs."""
    return _operation(model, sequence, kind, refused=pb.Refused(cause=cause))


def content_digest(operation: pb.Operation) -> bytes:
    """Returns the digest of what an operation asks for.

    How long a name holds is left out: that time begins when the request comes.
    """
    until_unix_s = operation.kept.until_unix_s
    if until_unix_s:
        operation.kept.until_unix_s = 1.0
    data = operation.SerializeToString(deterministic=True)
    if until_unix_s:
        operation.kept.until_unix_s = until_unix_s
    return hashlib.blake2b(data, digest_size=16).digest()


def sample(body: Body, config: Config, vocabulary: int) -> pb.Operation:
    """Returns the operation of asample; `vocabulary` is 0 if it is unknown."""
    fields = checked("SampleRequest", body)
    session = fields["sampling_session_id"]
    if session is None:
        raise Refused("a sample needs a sampling session: create_sampling_client makes one")
    tokens = _prompt(fields["prompt"], vocabulary)
    room = min(config.sampling.max_reply_tokens, config.sampling.max_episode_tokens - len(tokens))
    sampling = _sampling(fields["sampling_params"], config, vocabulary)
    # 0 stands for all that there is room for.
    sampling.max_reply_tokens = sampling.max_reply_tokens or max(0, room)
    if not 1 <= sampling.max_reply_tokens <= room:
        raise Refused(
            f"a prompt of {len(tokens)} tokens leaves room for {max(0, room)} of a reply, got "
            f"max_tokens = {sampling.max_reply_tokens}: set sampling.max_reply_tokens and "
            "sampling.max_episode_tokens"
        )
    sampling.prompt_logprobs = bool(fields["prompt_logprobs"])
    num_samples = whole_number("num_samples", fields["num_samples"], lowest=1, highest=_MAX_SAMPLES)
    return pb.Operation(
        id=f"{session}:{fields['seq_id']}:sample",
        sample=pb.Sample(
            prompt_token_ids=tokens.astype("<u4").tobytes(),
            num_samples=num_samples,
            sampling=sampling,
            name=weights_of(session),
        ),
    )


def _prompt(prompt: Body, vocabulary: int) -> "np.ndarray[Any, np.dtype[Any]]":
    """Returns the token ids of a prompt, each of the vocabulary."""
    token_ids: list[int] = []
    for chunk in checked("ModelInput", prompt)["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise Refused(f"a prompt is text here, got a chunk of type {chunk['type']}")
        token_ids += checked("EncodedTextChunk", chunk)["tokens"]
    if not token_ids:
        raise Refused("a prompt has one token at least, got none")
    tokens = np.asarray(token_ids)
    if tokens.dtype.kind not in "iu" or tokens.ndim > 1:
        raise Refused("a prompt is a list of token ids")
    if strange := tokens[(tokens < 0) | (tokens >= (vocabulary or MAX_TOKENS))].tolist():
        raise Refused(f"a prompt has token {strange[0]}, the vocabulary has {vocabulary}")
    return tokens


def _sampling(params: Body, config: Config, vocabulary: int) -> fleet_pb2.SamplingSettings:
    """Returns how replies are drawn; `max_reply_tokens` is 0 if the client gives no number."""
    fields = checked("SamplingParams", params)
    sampling = config.sampling.to_pb()
    if fields["seed"] is not None:
        sampling.seed = whole_number("seed", fields["seed"], lowest=0, highest=_LARGEST_SEED)
    sampling.max_reply_tokens = 0
    if fields["max_tokens"] is not None:
        sampling.max_reply_tokens = whole_number(
            "max_tokens", fields["max_tokens"], lowest=1, highest=1 << 22
        )
    sampling.temperature = number("temperature", fields["temperature"], lowest=0.0, highest=100.0)
    sampling.top_p = number("top_p", fields["top_p"], lowest=0.0, highest=1.0)
    if not sampling.top_p:
        raise Refused("top_p is above 0")
    top_k = whole_number("top_k", fields["top_k"], lowest=-1, highest=(1 << 32) - 1)
    sampling.top_k = max(0, top_k)
    sampling.min_p = 0.0
    stop = fields["stop"]
    sampling.ignore_eos = stop == []
    del sampling.stop[:]
    del sampling.stop_token_ids[:]
    for end in [stop] if isinstance(stop, str) else stop or ():
        if isinstance(end, str):
            sampling.stop.append(end)
            continue
        largest = (vocabulary or MAX_TOKENS) - 1
        sampling.stop_token_ids.append(whole_number("a stop token", end, lowest=0, highest=largest))
    if "" in sampling.stop:
        raise Refused("a text in stop has a character at least")
    return sampling


def sampled(result: pb.OperationResult) -> wire.SampleResponse:
    """Returns the answer to asample."""
    prompt_logprobs = result.samples[0].prompt_logprobs if result.samples else b""
    return wire.SampleResponse(
        prompt_logprobs=_NOT_A_NUMBER + prompt_logprobs if prompt_logprobs else None,
        sequences=[
            wire.SampledSequence(
                stop_reason=wire.LENGTH if reply.truncated else wire.STOP,
                tokens=reply.token_ids,
                logprobs=reply.logprobs,
            )
            for reply in result.samples
        ],
    )


def computed(result: pb.OperationResult) -> wire.ForwardBackwardOutput:
    """Returns the answer to forward_backward."""
    report = result.compute
    ends = np.cumsum([0, *map(len, report.logprobs)], dtype="<i8")
    logprobs = wire.BatchedTensor(
        data=b"".join(report.logprobs), offsets=ends.tobytes(), dtype=wire.FLOAT32
    )
    record = wire.ArrayRecord(fields={"logprobs": logprobs}, num_datums=len(report.logprobs))
    return wire.ForwardBackwardOutput(
        loss_fn_output_type="TensorData", loss_fn_outputs=[record], metrics=report.metrics
    )


def answer(request_id: str, result: pb.OperationResult) -> dict[str, Any]:
    """Returns the answer to all other operations; the SDK reads the fields of its kind."""
    model, _, kind = request_id.rpartition(":")
    name = result.name
    where = "path" if name.startswith("tinker://") else "sampling_session_id"
    if name.endswith(_IN_FLIGHT):
        name = f"{model}{_OF}{name}"
    fields = {
        "type": kind,
        "model_id": model.rpartition(":")[0],
        "metrics": dict(result.metrics),
    }
    return fields | ({where: name} if name else {})


def _first(fields: Body, kind: str, **operation: Any) -> pb.Operation:  # noqa: ANN401
    """Returns the first operation of a new model, with what its client says of the model."""
    _check_optimizer(fields)
    metadata = _texts(fields["user_metadata"])
    if MAX_STALENESS in metadata:
        text = metadata[MAX_STALENESS]
        if not text.isdecimal() or len(text) > 6:
            raise Refused(f"{MAX_STALENESS} is a number of steps from 0 to 999999, got {text!r}")
        operation[MAX_STALENESS] = int(text)
    return _operation(training_run(fields), 0, kind, user_metadata=metadata, **operation)


def _texts(metadata: Body | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}


def _operation(
    model: str,
    sequence: int,
    kind: str,
    **operation: Any,  # noqa: ANN401
) -> pb.Operation:
    identity = f"{model}:{sequence}:{kind}"
    return pb.Operation(id=identity, stream=model, number=sequence, **operation)


def _kept(ttl_s: object) -> pb.Kept:
    """Returns how long what is saved holds."""
    if ttl_s is None:
        return pb.Kept()
    seconds = number("ttl_seconds", ttl_s, lowest=1.0, highest=_LARGEST_TTL_S)
    return pb.Kept(until_unix_s=time.time() + seconds)


def _check_model(name: str | None, config: Config) -> None:
    path = config.model.path
    if name not in (str(path), path.name, str(path.absolute())):
        raise Refused(f"this server has {path.absolute()} only, not {name}")


def _check_optimizer(fields: Body) -> None:
    optimizer = fields["optimizer_config"]
    if optimizer is None:
        return
    # Another optimizer has other fields, of which the first unknown one says less than its name.
    if optimizer.get("type", "adamw") != "adamw":
        raise Refused(f"this server has the optimizer adamw only, not {optimizer['type']}")
    checked("AdamOptimizerConfig", optimizer)
