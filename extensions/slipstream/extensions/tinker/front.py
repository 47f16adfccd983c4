"""The HTTP process of `slipstream tinker`: the Tinker API in front of the controller.

It keeps what it can ask for again. Consumes: requests of the SDK, results. Produces: operations of
the controller, answers. Waits for: the end of an operation, at most `HOLD_S`. Unblocked by: the
controller, or the end of its stream of results; the SDK then asks again.
"""

import argparse
import asyncio
import json
import logging
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping
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
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import operations, wire_pb2
from slipstream.extensions.tinker.archives import Archives
from slipstream.extensions.tinker.operations import SAVES, Refused
from slipstream.protocol.access.run_token import run_credentials
from slipstream.protocol.access.security import call_metadata, open_channel
from slipstream.protocol.bounds import check_bounds
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

# Seconds for which an answer is held back until the operation has ended.
HOLD_S = 20.0
CALL_S = 30.0
MAX_BODY_BYTES = 24 << 20
# Most bytes of a larger request that are read, unpacked, to find whose turn it has.
MAX_READ_BYTES = 4 * MAX_BODY_BYTES
# Most requests of a key at once, of which a sample has one while it waits; the SDK is told to keep
# below. Others are sent again.
MAX_OPEN = 1536
MAX_SAMPLES = 1024
# Most samples of a session under way: others are sent again.
MAX_WAITING = 4096
# Most results that are kept here; the controller has the others for a while.
MAX_KEPT = 4096
# Most samples that one message tells of.
MAX_TOLD = 1024
# Longest time, in seconds, in which a controller that works takes a sample.
SEND_S = 30.0
_READ_BYTES = 1 << 20
_PREFIX, _PROTOBUF = "/api/v1", "application/x-protobuf"
_HERE = (LOOPBACK.encode(), b"localhost")
_LISTED = [("training_runs", "GET"), ("checkpoints", "GET"), ("weights_info", "POST")]
_STATUS = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}
# What reading a request raises whose fields are not those of the SDK.
_MALFORMED = (
    *(ArithmeticError, AttributeError, DecodeError, LookupError, RecursionError, TypeError),
    *(ClientDisconnect, ProtocolError, ValueError),
)

Body: TypeAlias = dict[str, Any]

logger = logging.getLogger(__name__)


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
        self._config, self._stub = config, stub
        self._call = {"metadata": metadata, "timeout": CALL_S}
        self._vocabulary = vocabulary_size(config.model.path)
        self._archives, self.samples = Archives(config), SampleStream(stub, metadata)
        self._open: Counter[bytes] = Counter()
        self._orders: Mapping[str, Callable[[Body], pb.Operation]] = {
            "create_model": partial(operations.create_model, config=config),
            "load_weights": operations.load_weights,
            "optim_step": operations.optim_step,
            **{kind: partial(operations.save, kind, in_flight=in_flight) for kind in SAVES},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request of HTTP."""
        path, head = scope["path"].removeprefix(f"{_PREFIX}/"), dict(scope["headers"])
        key, encoding = head.get(b"x-api-key", b""), head.get(b"content-encoding", b"")
        # Unlike one that a page in a browser was led to send, which has the page's own host.
        is_here = head.get(b"host", b"").partition(b":")[0] in _HERE
        # Their addresses are secret: whoever opens them has no key.
        if is_here and (file := self._archives.file(path)):
            await FileResponse(file)(scope, receive, send)
            return
        self._open[key] += 1
        try:
            # Nor does a page send a key without the server's leave.
            if not key.startswith(b"tml-") or not is_here:
                cause = f"a request needs an api_key that begins with tml-, and {LOOPBACK}"
                raise Refused(cause, 401)
            if self._open[key] > MAX_OPEN:
                raise Refused(f"{MAX_OPEN} requests of this key are open already", 429)
            if encoding not in (b"", b"zstd"):
                told = encoding.decode("latin-1")
                raise Refused(f"a body is sent as it is, or in zstd, not in {told}", 415)
            response = await self._answer(path, Request(scope, receive), is_packed=bool(encoding))
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

    async def _answer(self, path: str, request: Request, *, is_packed: bool) -> Response:
        data = await _body(request)
        if is_packed:
            data = await asyncio.to_thread(_unpacked, data)
        if path in ("forward_backward", "forward"):
            passed = wire_pb2.ForwardBackwardRequest.FromString(bytes(data))
            turn = passed.model_id, passed.seq_id, "forward_backward"
            return await self._submit(turn, data, lambda: operations.forward_backward(passed))
        body: Body = from_json(data) if data else {}
        if not isinstance(body, dict):
            raise Refused("a body is a JSON object")
        if order := self._orders.get(path):
            model = body.get("model_id") or operations.training_run(body)
            turn = model, body.get("seq_id") or 0, path
            return await self._submit(turn, data, lambda: order(body))
        _check_size(data, MAX_BODY_BYTES)
        match path.split("/"):
            case ["asample"]:
                operation = operations.sample(body, self._config, self._vocabulary)
                await self.samples.send(operation)
                names = [f"{operation.id}:{n}" for n in range(operation.sample.num_samples)]
                return _json({"request_id": operation.id, "sample_sequence_ids": names})
            case ["retrieve_future"]:
                return await self._retrieve(str(body["request_id"]))
            case ["session_heartbeat"]:
                await self._stub.Beat(pb.BeatRequest(session=body["session_id"]), **self._call)
                return _json({"type": "session_heartbeat"})
            case ["sessions", session, "finish"]:
                end = pb.Operation(id=f"{session}:finish", stream=session, finish=pb.Finish())
                await self._stub.Submit(end, **self._call)
                return _json({})
            case ["training_runs", _, *_] if request.method != "GET":
                asked = operations.keep(request.method, path, body)
                receipt = await self._stub.Keep(asked, **self._call)
                if receipt.is_unknown:
                    raise Refused(f"{asked.name} is not there", 404)
                return _json({})
            case [kind, *_] if (kind, request.method) in _LISTED:
                query = body or dict(request.query_params)
                address = f"http://{request.headers['host']}{_PREFIX}"
                found = await self._archives.answer(path, query, address)
                if found is None:
                    raise Refused(f"{query.get('tinker_path', path)} is not there", 404)
                return _json(found)
        if (told := self._at_once(path, body)) is not None:
            return _json(told)
        raise Refused(f'{path} is not served; the guide "Your own loop" has what is', 404)

    def _at_once(self, path: str, body: Body) -> Body | None:
        """Returns the answer to what needs no controller, or None if `path` is something else."""
        lora, name = self._config.lora, str(self._config.model.path)
        match path.split("/"):
            case ["client", "config"]:
                return {"sample_max_concurrent_requests": MAX_SAMPLES}
            case ["client", "dynamic_config"]:
                return {}
            case ["healthz"]:
                return {"status": "ok"}
            case ["telemetry"]:
                return {"status": "accepted"}
            case ["create_session"]:
                told = "the whole model is trained, not an adapter, whatever rank is asked for"
                modules = ", ".join(lora.target_modules)
                if lora.adapters:
                    told = (
                        f"{len(lora.adapters)} models at once, each with an adapter of rank 1 to "
                        f"{lora.rank} on {modules}"
                    )
                elif lora.rank:
                    told = f"an adapter has rank {lora.rank} on {modules}"
                session = f"s{secrets.token_hex(8)}"
                return {"type": path, "session_id": session, "warning_message": told}
            case ["create_sampling_session"]:
                session = operations.sampling_session(body, self._config)
                return {"type": path, "sampling_session_id": session}
            case ["get_server_capabilities"]:
                supported = {
                    "model_name": name,
                    "max_context_length": self._config.sampling.max_episode_tokens,
                    "trainable": True,
                    "sampleable": True,
                }
                return {"supported_models": [supported]}
            case ["get_info"]:
                return {
                    "type": path,
                    "model_id": body["model_id"],
                    "model_name": name,
                    "base_model": name,
                    "model_data": {"model_name": name, "tokenizer_id": name},
                    "is_lora": bool(lora.rank),
                    # Each of several models has a rank of its own.
                    "lora_rank": None if lora.adapters else lora.rank or None,
                }
            case ["samplers", *rest]:
                sampler = {"sampler_id": "/".join(rest), "base_model": name}
                weights = operations.weights_of(sampler["sampler_id"])
                has_path = weights.startswith("tinker://")
                return sampler | ({"model_path": weights} if has_path else {})
        return None

    async def _submit(
        self, turn: tuple[str, int, str], data: bytes | bytearray, read: Callable[[], pb.Operation]
    ) -> Response:
        """Submits what `read` returns, or, if it is refused or `data` too large, what fails.

        The SDK has counted it, and its later operations wait for their numbers.
        """
        try:
            _check_size(data, MAX_BODY_BYTES)
            operation = read()
            await self._stub.Submit(operation, **self._call)
        except (*_MALFORMED, grpc.aio.AioRpcError) as error:
            cause = _cause(error)
            if isinstance(error, grpc.aio.AioRpcError):
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                cause = error.details() or ""
            operation = operations.refused(*turn, cause)
            await self._stub.Submit(operation, **self._call)
        return _json({"request_id": operation.id, "model_id": operation.stream})

    async def _retrieve(self, name: str) -> Response:
        result = await self.samples.result(name, HOLD_S)
        if result is None:
            asked = pb.AwaitRequest(id=name, limit_s=HOLD_S)
            result = await self._stub.Await(asked, **self._call | {"timeout": HOLD_S + CALL_S})
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


def _check_size(data: bytes | bytearray, most: int) -> None:
    if len(data) > most:
        raise Refused(f"a request has at most {MAX_BODY_BYTES} bytes, got {len(data)}")


async def _body(request: Request) -> bytearray:
    found = bytearray()
    async for part in request.stream():
        found += part
        _check_size(found, MAX_READ_BYTES)
    return found


def _unpacked(data: bytearray) -> bytearray:
    import pyarrow

    found = bytearray()
    try:
        with pyarrow.input_stream(pyarrow.py_buffer(data), compression="zstd") as stream:
            while part := stream.read(_READ_BYTES):
                found += part
                _check_size(found, MAX_READ_BYTES)
    except OSError as error:
        raise Refused(f"the body is no zstd: {error}") from error
    return found


def _json(body: Body, status: int = 200) -> Response:
    return Response(json.dumps(body), status, media_type="application/json")


class SampleStream:
    """Sends samples on one stream, which the first one opens, also after the last one's end."""

    def __init__(self, stub: Any, metadata: Any) -> None:  # noqa: ANN401 - gRPC's
        self._stub, self._metadata = stub, metadata
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        # The samples without a result, and how many of them each session has.
        self._open: dict[str, asyncio.Future[None]] = {}
        self._sessions: Counter[str] = Counter()
        self._results: dict[str, pb.OperationResult] = {}
        # Samples whose clients have their results; the controller hears of it with the next sample.
        self._told: list[str] = []

    async def send(self, operation: pb.Operation) -> None:
        """Sends a sample unless it is under way.

        Raises ProtocolError if it is out of bounds, Refused if its client must send it again.
        """
        name = operation.id
        if name in self._open or name in self._results:
            return
        session = name.partition(":")[0]
        if (number := self._sessions[session]) >= MAX_WAITING:
            cause = f"{number} samples of session {session} wait: send more when some are done"
            raise Refused(cause, 429)
        check_bounds(operation)
        self._open[name] = asyncio.get_running_loop().create_future()
        self._sessions[session] += 1
        try:
            async with asyncio.timeout(SEND_S), self._writing:
                if self._call is None:
                    self._call = self._stub.Sample(metadata=self._metadata)
                    self._reading = asyncio.ensure_future(self._read(self._call))
                operation.told.extend(self._told[:MAX_TOLD])
                del self._told[:MAX_TOLD]
                await self._call.write(operation)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            self._end(name)
            raise Refused("the controller does not answer", 503) from error
        except asyncio.CancelledError:
            # Else it would be under way for ever.
            self._end(name)
            raise

    async def result(self, name: str, limit_s: float) -> pb.OperationResult | None:
        """Returns the result of a sample, one that is not done after the limit, or None.

        None: this process does not have it, but the controller may.
        """
        if waiting := self._open.get(name):
            await asyncio.wait((waiting,), timeout=limit_s)
            if not waiting.done():
                return pb.OperationResult()
        if result := self._results.pop(name, None):
            self._told.append(name)
        return result

    async def close(self) -> None:
        """Ends the stream."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        try:
            async for result in call:
                self._results[result.id] = result
                if len(self._results) > MAX_KEPT:
                    del self._results[next(iter(self._results))]
                self._end(result.id)
        except grpc.aio.AioRpcError as error:
            logger.warning("the stream of samples ended: %s", error.details())
        finally:
            call.cancel()
            self._call = None
            for name in list(self._open):
                self._end(name)

    def _end(self, name: str) -> None:
        """Wakes those who wait for a sample."""
        if waiting := self._open.pop(name, None):
            waiting.set_result(None)
            self._sessions -= Counter([name.partition(":")[0]])


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
        uvloop.run(serve(config, arguments.port, in_flight=arguments.in_flight))
    except (SlipstreamError, OSError) as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
