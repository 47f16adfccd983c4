"""The HTTP process of `slipstream tinker`: the Tinker API in front of the controller.

It keeps what it can ask for again. Consumes: requests of the SDK, results. Produces: operations of
the controller, answers. Waits for: the end of an operation, at most `HOLD_S`. Unblocked by: the
controller, or the end of its stream of results; the SDK then asks again.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio
import uvicorn
import uvloop
from google.protobuf.message import DecodeError
from pydantic_core import from_json
from slipstream.client.agent_gateway import LOOPBACK, bounded_server
from slipstream.core.configuration.config_file import load_config, vocabulary_size
from slipstream.core.errors import USAGE_ERROR, ProtocolError, SlipstreamError
from slipstream.core.logs import use_format
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import operations, wire_pb2
from slipstream.extensions.tinker.archives import Archives
from slipstream.extensions.tinker.bodies import MAX_BODY_BYTES, Bodies, HeldBody, check_size
from slipstream.extensions.tinker.contract import UNSERVED, checked
from slipstream.extensions.tinker.operations import SAVES
from slipstream.extensions.tinker.owners import is_of, new_session, owner_of_key, owners_in
from slipstream.extensions.tinker.request_fields import Refused
from slipstream.extensions.tinker.requested_passes import forward_backward
from slipstream.extensions.tinker.sample_stream import SampleStream
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import call_metadata, open_channel
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

# Seconds for which an answer is held back until the operation has ended.
HOLD_S = 20.0
CALL_S = 30.0
# Most requests of a key at once, of which a sample has one while it waits; the SDK is told to keep
# below. Others are sent again.
MAX_OPEN = 1536
MAX_SAMPLES = 1024
_PREFIX = "/api/v1"
_PROTOBUF = "application/x-protobuf"
_HERE = (LOOPBACK.encode(), b"localhost")
_LISTED = [("training_runs", "GET"), ("checkpoints", "GET"), ("weights_info", "POST")]
# Fields and parts of addresses that are ids, of sessions or of what came from them.
_IDS = ("session_id", "model_id", "sampling_session_id", "request_id")
_PATHS = ("path", "model_path", "tinker_path")
_ADDRESSED = ("sessions", "training_runs", "samplers")
# The newest state of the run's only model, which the controller gives to its owner alone.
_NEWEST = "tinker://newest"
_STATUS = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}
# Raised by reading a request whose fields are not those of the SDK.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    ClientDisconnect,
    DecodeError,
    LookupError,
    ProtocolError,
    RecursionError,
    TypeError,
    ValueError,
)

Body: TypeAlias = dict[str, Any]


class Front:
    """Answers requests; an ASGI application."""

    def __init__(
        self,
        config: Config,
        stub: Any,  # noqa: ANN401 - gRPC's
        metadata: Any,  # noqa: ANN401 - gRPC's
        *,
        in_flight: bool,
    ) -> None:
        """Takes the stub of the controller's service; `in_flight` is said of all publishes."""
        self._config = config
        self._stub = stub
        self._call = {"metadata": metadata, "timeout": CALL_S}
        self._vocabulary = vocabulary_size(config.model.path)
        self._archives = Archives(config)
        self._bodies = Bodies()
        self.samples = SampleStream(stub, metadata)
        self._open: Counter[bytes] = Counter()
        self._orders: Mapping[str, Callable[[Body], pb.Operation]] = {
            "create_model": partial(operations.create_model, config=config),
            "load_weights": partial(operations.load_weights, config=config),
            "optim_step": operations.optim_step,
            **{kind: partial(operations.save, kind, in_flight=in_flight) for kind in SAVES},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request of HTTP."""
        path = scope["path"].removeprefix(f"{_PREFIX}/")
        head = dict(scope["headers"])
        key = head.get(b"x-api-key", b"")
        encoding = head.get(b"content-encoding", b"")
        # Unlike one that a page in a browser was led to send, which has the page's own host.
        is_here = head.get(b"host", b"").partition(b":")[0] in _HERE
        # The addresses of files are secret: whoever opens one has no key.
        if is_here and (file := self._archives.file(path)):
            await FileResponse(file)(scope, receive, send)
            return
        self._open[key] += 1
        with self._bodies.body() as body:
            try:
                # Nor does a page send a key without the server's leave.
                if not key.startswith(b"tml-") or not is_here:
                    cause = f"a request needs an api_key that begins with tml-, and {LOOPBACK}"
                    raise Refused(cause, 401)
                if self._open[key] > MAX_OPEN:
                    raise Refused(f"{MAX_OPEN} requests of this key are open already", 429)
                if encoding not in (b"", b"zstd"):
                    name = encoding.decode("latin-1")
                    raise Refused(f"a body is sent as it is, or in zstd, not in {name}", 415)
                request = Request(scope, receive)
                await body.read(request)
                if encoding:
                    await body.unpack()
                owner = owner_of_key(key, self._config.run.name)
                response = await self._answer(path, request, body, owner)
            except _MALFORMED as error:
                status = error.status if isinstance(error, Refused) else 400
                response = _json({"error": _cause(error)}, status)
            except grpc.aio.AioRpcError as error:
                # The SDK asks again: the controller may be about to come back.
                status = _STATUS.get(error.code(), 500)
                response = _json({"error": error.details() or ""}, status)
            finally:
                self._open -= Counter([key])
        await response(scope, receive, send)

    async def _answer(self, path: str, request: Request, held: HeldBody, owner: str) -> Response:
        data = held.data
        if path in ("forward_backward", "forward"):
            message = wire_pb2.ForwardBackwardRequest.FromString(bytes(data))
            _check_owner(message.model_id, owner)
            turn = message.model_id, message.seq_id, "forward_backward"
            return await self._submit(turn, data, lambda: forward_backward(message))
        body: Body = from_json(data) if data else {}
        if not isinstance(body, dict):
            raise Refused("a body is a JSON object")
        query = body or dict(request.query_params)
        for name in _ids_in(path, query):
            _check_owner(name, owner)
        if order := self._orders.get(path):
            model = body.get("model_id") or operations.training_run(body)
            turn = model, body.get("seq_id") or 0, path
            return await self._submit(turn, data, lambda: order(body))
        check_size(data, 0, MAX_BODY_BYTES)
        if path.startswith("training_runs/") and request.method != "GET":
            change = operations.keep(request.method, path, body)
            receipt = await self._stub.Keep(change, **self._call)
            if receipt.is_unknown:
                raise Refused(f"{change.name} is not there", 404)
            return _json({})
        if (path.partition("/")[0], request.method) in _LISTED:
            address = f"http://{request.headers['host']}{_PREFIX}"
            listed = await self._archives.answer(path, query, address, owner)
            if listed is None:
                raise Refused(f"{query.get('tinker_path', path)} is not there", 404)
            return _json(listed)
        match path.split("/"):
            case ["asample"]:
                operation = operations.sample(body, self._config, self._vocabulary)
                await self.samples.send(operation)
                names = [f"{operation.id}:{n}" for n in range(operation.sample.num_samples)]
                return _json({"request_id": operation.id, "sample_sequence_ids": names})
            case ["retrieve_future"]:
                fields = checked("FutureRetrieveRequest", body)
                return await self._retrieve(str(fields["request_id"]))
            case ["session_heartbeat"]:
                fields = checked("SessionHeartbeatRequest", body)
                await self._stub.Beat(pb.BeatRequest(session=fields["session_id"]), **self._call)
                return _json({"type": "session_heartbeat"})
            case ["sessions", session, "finish"]:
                end = pb.Operation(id=f"{session}:finish", stream=session, finish=pb.Finish())
                await self._stub.Submit(end, **self._call)
                return _json({})
        if (answer := self._at_once(path, body, owner)) is not None:
            return _json(answer)
        raise Refused(_unserved(path), 404)

    def _at_once(self, path: str, body: Body, owner: str) -> Body | None:
        """Returns the answer to what needs no controller, or None if `path` is something else."""
        lora = self._config.lora
        # A client has another working directory.
        folder = str(self._config.model.path.absolute())
        match path.split("/"):
            case ["client", "config"]:
                checked("ClientConfigRequest", body)
                return {"sample_max_concurrent_requests": MAX_SAMPLES}
            case ["client", "dynamic_config"]:
                return {}
            case ["healthz"]:
                return {"status": "ok"}
            case ["telemetry"]:
                return {"status": "accepted"}
            case ["create_session"]:
                checked("CreateSessionRequest", body)
                session = new_session(owner)
                return {"type": path, "session_id": session, "warning_message": self._told()}
            case ["create_sampling_session"]:
                session = operations.sampling_session(body, self._config)
                return {"type": path, "sampling_session_id": session}
            case ["get_server_capabilities"]:
                supported = {
                    "model_name": folder,
                    "max_context_length": self._config.sampling.max_episode_tokens,
                    "trainable": True,
                    "sampleable": True,
                }
                return {"supported_models": [supported]}
            case ["get_info"]:
                fields = checked("GetInfoRequest", body)
                return {
                    "type": path,
                    "model_id": fields["model_id"],
                    "model_name": folder,
                    "base_model": folder,
                    "model_data": {"model_name": folder, "tokenizer_id": folder},
                    "is_lora": bool(lora.rank),
                    # Several models have ranks of their own.
                    "lora_rank": None if lora.adapters else lora.rank or None,
                }
            case ["samplers", *names]:
                # The SDK takes a name with two slashes for a model and its variant.
                base_model = f"{folder}/" if folder.count("/") == 2 else folder
                sampler = {"sampler_id": "/".join(names), "base_model": base_model}
                weights = operations.weights_of(sampler["sampler_id"])
                if weights.startswith("tinker://"):
                    sampler["model_path"] = weights
                return sampler
        return None

    def _told(self) -> str:
        """Returns what a client is told of the models here when it comes."""
        lora = self._config.lora
        modules = ", ".join(lora.target_modules)
        if lora.adapters:
            return (
                f"{len(lora.adapters)} models at once, each with an adapter of rank 1 to "
                f"{lora.rank} on {modules}"
            )
        if lora.rank:
            return f"an adapter has rank {lora.rank} on {modules}"
        return "the whole model is trained, not an adapter, whatever rank is asked for"

    async def _submit(
        self, turn: tuple[str, int, str], data: bytes | bytearray, read: Callable[[], pb.Operation]
    ) -> Response:
        """Submits what `read` returns, or, if it is refused or `data` too large, what fails.

        The SDK has counted it, and its later operations wait for their numbers.
        """
        try:
            check_size(data, 0, MAX_BODY_BYTES)
            operation = read()
            operation.digest = operations.content_digest(operation)
            await self._stub.Submit(operation, **self._call)
        except (*_MALFORMED, grpc.aio.AioRpcError) as error:
            cause = _cause(error)
            if isinstance(error, grpc.aio.AioRpcError):
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                cause = error.details() or ""
            operation = operations.refused(*turn, cause)
            operation.digest = operations.content_digest(operation)
            await self._stub.Submit(operation, **self._call)
        return _json({"request_id": operation.id, "model_id": operation.stream})

    async def _retrieve(self, name: str) -> Response:
        result = await self.samples.result(name, HOLD_S)
        if result is None:
            call = self._call | {"timeout": HOLD_S + CALL_S}
            result = await self._stub.Await(pb.AwaitRequest(id=name, limit_s=HOLD_S), **call)
        assert result is not None
        if result.is_unknown:
            raise Refused(f"request {name} is not known: send it again", 410)
        if not result.is_done:
            return _json({"type": "try_again", "request_id": name, "queue_state": "active"})
        if result.error:
            return _json({"error": result.error, "category": "user"})
        encoders = {"sample": operations.sampled, "forward_backward": operations.computed}
        if encode := encoders.get(name.rpartition(":")[2]):
            return Response(encode(result).SerializeToString(), media_type=_PROTOBUF)
        return _json(operations.answer(name, result))


def _cause(error: Exception) -> str:
    is_told = isinstance(error, Refused | ProtocolError)
    return str(error) if is_told else f"the request is malformed: {error!r}"


def _ids_in(path: str, body: Body) -> Iterator[str]:
    """Yields the ids in an address and in the fields of a request, which must be its owner's."""
    if path == "telemetry":
        return
    kind, _, rest = path.partition("/")
    if kind in _ADDRESSED and rest:
        yield rest
    for name in _IDS:
        if body.get(name) is not None:
            yield str(body[name])
    for name in _PATHS:
        value = str(body.get(name) or "")
        if value.startswith("tinker://") and value != _NEWEST:
            yield value


def _check_owner(name: str, owner: str) -> None:
    """Raises Refused unless an id is of `owner`."""
    if is_of(name, owner):
        return
    if owners_in(name):
        raise Refused(f"{name} is of another api_key", 403)
    raise Refused(f"{name} is no id that this server gave", 404)


def _unserved(path: str) -> str:
    reasons = [
        f": {reason}"
        for part, reason in UNSERVED.items()
        if path == part or path.startswith(f"{part}/")
    ]
    return f'{path} is not served{"".join(reasons)}; the guide "Your own loop" has what is'


def _json(body: Body, status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


async def serve(config: Config, port: int, *, in_flight: bool = False) -> None:
    """Serves on loopback until a signal; with `in_flight` sessions follow the newest weights."""
    credentials = run_credentials(config)
    async with open_channel(config.controller.address, credentials) as channel:
        stub = operations_pb2_grpc.OperationServiceStub(channel)
        metadata = call_metadata(credentials, config.run.id)
        front = Front(config, stub, metadata, in_flight=in_flight)
        try:
            await uvicorn.Server(bounded_server(front, port=port)).serve()  # type: ignore[arg-type]
        finally:
            await front.samples.close()


def main() -> int:
    """Runs the process; returns 2 for settings that cannot work."""
    parser = argparse.ArgumentParser(prog="slipstream-tinker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--in-flight", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        config = load_config(arguments.config, arguments.overrides)
        use_format(config, "tinker")
        uvloop.run(serve(config, arguments.port, in_flight=arguments.in_flight))
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
