"""The HTTP process of `slipstream tinker`: the Tinker API in front of the controller.

It keeps what it can ask for again. Consumes: requests of the SDK. Produces: operations of the
controller, answers.
Waits for: the end of an operation, at most `HOLD_S`. Unblocked by: the controller; the SDK then
asks again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import grpc.aio
import uvicorn
import uvloop
from google.protobuf.message import DecodeError
from slipstream.client.agent_gateway import LOOPBACK, REQUEST_LIMIT_S, bounded_server
from slipstream.core.configuration.config_file import load_config, vocabulary_size
from slipstream.core.errors import USAGE_ERROR, ProtocolError, SlipstreamError
from slipstream.core.settings.config import Config
from slipstream.extensions.tinker import operations, wire_pb2
from slipstream.extensions.tinker.archives import Archives
from slipstream.extensions.tinker.operations import NotReady, Refused
from slipstream.extensions.tinker.sample_stream import SampleStream
from slipstream.protocol.access.security import Credentials, call_metadata, open_channel
from slipstream.v1 import operations_pb2 as pb
from slipstream.v1 import operations_pb2_grpc
from starlette.responses import FileResponse
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
_READ_BYTES = 1 << 20
_PREFIX = "/api/v1"
_STATUS = {
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
}
# What reading a request raises whose fields are not those of the SDK.
_MALFORMED = (
    *(ArithmeticError, AttributeError, DecodeError, LookupError, RecursionError, TypeError),
    *(ProtocolError, ValueError),
)
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"

Body: TypeAlias = dict[str, Any]
# Status, content type and body.
Answer: TypeAlias = tuple[int, str, bytes]


class Front:
    """Answers requests; an ASGI application."""

    def __init__(
        self,
        config: Config,
        stub: Any,  # noqa: ANN401 - gRPC's
        metadata: Any,  # noqa: ANN401 - gRPC's
        *,
        in_flight: bool,
        limit_s: float = REQUEST_LIMIT_S,
    ) -> None:
        """Takes the stub of the controller's service; `in_flight` is said of all publishes.

        A body comes within `limit_s`.
        """
        self._limit_s = limit_s
        self._config, self._stub, self._metadata = config, stub, metadata
        self._vocabulary = vocabulary_size(config)
        self._archives, self._samples = Archives(config), SampleStream(stub, metadata)
        self._open: Counter[str] = Counter()
        name, lora = str(config.model.path), config.lora
        # Each of several models has a rank of its own.
        rank = None if lora.adapters else lora.rank or None
        self._model: Body = {"base_model": name, "is_lora": bool(lora.rank), "lora_rank": rank}
        supported = {
            "model_name": name,
            "max_context_length": config.sampling.max_episode_tokens,
            "trainable": True,
            "sampleable": True,
        }
        self._at_once: Mapping[str, Callable[[Body], Body]] = {
            "client/config": lambda _: {"sample_max_concurrent_requests": MAX_SAMPLES},
            "client/dynamic_config": lambda _: {},
            "healthz": lambda _: {"status": "ok"},
            "telemetry": lambda _: {"status": "accepted"},
            "create_session": self._create_session,
            "get_server_capabilities": lambda _: {"supported_models": [supported]},
            "get_info": self._info,
            "create_sampling_session": lambda body: {
                "type": "create_sampling_session",
                "sampling_session_id": operations.sampling_session(body, config),
            },
        }
        self._orders: Mapping[str, Callable[[Body], pb.Operation]] = {
            "create_model": lambda body: operations.create_model(body, config),
            "load_weights": operations.load_weights,
            "optim_step": operations.optim_step,
            "save_weights_for_sampler": lambda body: operations.save_weights_for_sampler(
                body, in_flight=in_flight
            ),
            "save_weights": operations.save_weights,
            "save_weights_external": lambda body: operations.save_weights(body, "external_weights"),
        }

    async def close(self) -> None:
        """Ends the stream of samples."""
        await self._samples.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request of HTTP."""
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        path, key = str(scope["path"]).removeprefix(f"{_PREFIX}/"), headers.get("x-api-key", "")
        # Unlike one that a page in a browser was led to send, which has the page's own host.
        is_here = headers.get("host", "").partition(":")[0] in (LOOPBACK, "localhost")
        # Their addresses are secret: whoever opens them has no key.
        if is_here and (file := self._archives.file(path)):
            await FileResponse(file)(scope, receive, send)
            return
        more: list[tuple[bytes, bytes]] = []
        self._open[key] += 1
        try:
            encoding = headers.get("content-encoding", "zstd")
            # Nor does a page send a key without the server's leave.
            if not key.startswith("tml-") or not is_here:
                cause = f"a request needs an api_key that begins with tml-, and {LOOPBACK}"
                status, kind, body = _error(401, cause)
            elif self._open[key] > MAX_OPEN:
                cause = f"{MAX_OPEN} requests of this key are open already"
                status, kind, body = _error(429, cause)
            elif encoding != "zstd":
                cause = f"a body is sent as it is, or in zstd, not in {encoding}"
                status, kind, body = _error(415, cause)
            else:
                status, kind, body = await self._answer(path, scope, headers, receive)
        except _MALFORMED as error:
            status, kind, body = _error(400, _cause(error))
        except NotReady as error:
            status, kind, body = _error(503, str(error))
        except TimeoutError:
            status, kind, body = _error(408, f"a body comes within {self._limit_s:g} s")
            more = [(b"connection", b"close")]
        except grpc.aio.AioRpcError as error:
            # The SDK asks again: the controller may be about to come back.
            status = _STATUS.get(error.code(), 500)
            status, kind, body = _error(status, error.details() or "")
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
        own = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *more]
        await send({"type": "http.response.start", "status": status, "headers": own})
        await send({"type": "http.response.body", "body": body})

    async def _answer(
        self, path: str, scope: Scope, headers: Mapping[str, str], receive: Receive
    ) -> Answer:
        async with asyncio.timeout(self._limit_s):
            data = await _body(receive)
        if headers.get("content-encoding") == "zstd":
            data = await asyncio.to_thread(_unpacked, data)
        cause = _too_large(len(data)) if len(data) > MAX_BODY_BYTES else ""
        if path in ("forward_backward", "forward"):
            request = wire_pb2.ForwardBackwardRequest.FromString(data)
            turn = request.model_id, request.seq_id, "forward_backward"
            return await self._submit(turn, lambda: operations.forward_backward(request), cause)
        body: Body = json.loads(data) if data else {}
        if not isinstance(body, dict):
            raise Refused("a body is a JSON object")
        if path.startswith("training_runs/") and scope["method"] != "GET":
            asked = operations.keep(scope["method"], path, body)
            receipt = await self._stub.Keep(asked, metadata=self._metadata, timeout=CALL_S)
            self._archives.forget(asked.name)
            return _error(404, f"{asked.name} is not there") if receipt.is_unknown else _json({})
        is_listed = path.startswith(("training_runs", "checkpoints")) and scope["method"] == "GET"
        if is_listed or path == "weights_info":
            query = body or dict(parse_qsl(scope["query_string"].decode("latin-1")))
            address = f"http://{headers['host']}{_PREFIX}"
            found = await self._archives.answer(path, query, address)
            what = query.get("tinker_path", path)
            return _error(404, f"{what} is not there") if found is None else _json(found)
        if order := self._orders.get(path):
            model = body.get("model_id") or operations.training_run(body)
            turn = model, body.get("seq_id") or 0, path
            return await self._submit(turn, lambda: order(body), cause)
        if cause:
            raise Refused(cause)
        if path in self._at_once:
            return _json(self._at_once[path](body))
        match path.split("/"):
            case ["asample"]:
                operation = operations.sample(body, self._config, self._vocabulary)
                if cause := await self._samples.send(operation):
                    return _error(429, cause)
                names = [f"{operation.id}:{n}" for n in range(operation.sample.num_samples)]
                return _json({"request_id": operation.id, "sample_sequence_ids": names})
            case ["session_heartbeat"]:
                beat = pb.BeatRequest(session=body["session_id"])
                await self._stub.Beat(beat, metadata=self._metadata, timeout=CALL_S)
                return _json({"type": "session_heartbeat"})
            case ["retrieve_future"]:
                return await self._retrieve(str(body["request_id"]))
            case ["samplers", *session]:
                sampler = {"sampler_id": "/".join(session), "base_model": self._model["base_model"]}
                weights = operations.weights_of(sampler["sampler_id"])
                has_path = weights.startswith("tinker://")
                return _json(sampler | ({"model_path": weights} if has_path else {}))
            case ["sessions", session, "finish"]:
                operation = operations.finish(session)
                await self._stub.Submit(operation, metadata=self._metadata, timeout=CALL_S)
                return _json({})
        return _error(404, f'{path} is not served; the guide "Your own loop" has what is')

    def _create_session(self, _: Body) -> Body:
        lora = self._config.lora
        told = "the whole model is trained, not an adapter, whatever rank is asked for"
        if lora.adapters:
            told = (
                f"{len(lora.adapters)} models at once, each with an adapter of rank 1 to "
                f"{lora.rank} on {', '.join(lora.target_modules)}"
            )
        elif lora.rank:
            told = f"an adapter has rank {lora.rank} on {', '.join(lora.target_modules)}"
        name = f"s{secrets.token_hex(8)}"
        return {"type": "create_session", "session_id": name, "warning_message": told}

    def _info(self, body: Body) -> Body:
        name = self._model["base_model"]
        own = {"type": "get_info", "model_id": body["model_id"], "model_name": name}
        return self._model | own | {"model_data": {"model_name": name, "tokenizer_id": name}}

    async def _submit(
        self, turn: tuple[str, int, str], read: Callable[[], pb.Operation], cause: str
    ) -> Answer:
        """Submits what `read` returns, or, with a `cause`, what fails in the same turn.

        The SDK has counted it, and its later operations wait for their numbers.
        """
        try:
            if cause:
                raise Refused(cause)
            operation = read()
            await self._stub.Submit(operation, metadata=self._metadata, timeout=CALL_S)
        except (*_MALFORMED, grpc.aio.AioRpcError) as error:
            if isinstance(error, grpc.aio.AioRpcError):
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise
                cause = error.details() or ""
            operation = operations.refused(*turn, cause or _cause(error))
            await self._stub.Submit(operation, metadata=self._metadata, timeout=CALL_S)
        return _json({"request_id": operation.id, "model_id": operation.stream})

    async def _retrieve(self, name: str) -> Answer:
        result = await self._samples.result(name, HOLD_S)
        if result is None:
            asked = pb.AwaitRequest(id=name, limit_s=HOLD_S)
            result = await self._stub.Await(asked, metadata=self._metadata, timeout=HOLD_S + CALL_S)
        assert result is not None
        if result.is_unknown:
            return _error(410, f"request {name} is not known: send it again")
        if not result.is_done:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return _json(again)
        if result.error:
            return _json({"error": result.error, "category": "user"})
        kind = name.rpartition(":")[2]
        if kind == "sample":
            return 200, _PROTOBUF, operations.sampled(result).SerializeToString()
        if kind == "forward_backward":
            return 200, _PROTOBUF, operations.computed(result).SerializeToString()
        return _json(operations.answer(name, result))


def _cause(error: Exception) -> str:
    is_told = isinstance(error, Refused | ProtocolError)
    return str(error) if is_told else f"the request is malformed: {error!r}"


def _too_large(size: int) -> str:
    return f"a request has at most {MAX_BODY_BYTES} bytes, got {size}"


def _unpacked(data: bytes) -> bytes:
    import pyarrow

    found = bytearray()
    try:
        with pyarrow.input_stream(pyarrow.py_buffer(data), compression="zstd") as stream:
            while part := stream.read(_READ_BYTES):
                found += part
                if len(found) > MAX_READ_BYTES:
                    raise Refused(_too_large(len(found)))
    except OSError as error:
        raise Refused(f"the body is no zstd: {error}") from error
    return bytes(found)


async def _body(receive: Receive) -> bytes:
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the client has gone")
        found += message.get("body", b"")
        if len(found) > MAX_READ_BYTES:
            raise Refused(_too_large(len(found)))
        if not message.get("more_body"):
            return bytes(found)


def _json(body: Mapping[str, Any]) -> Answer:
    return 200, _JSON, json.dumps(body).encode()


def _error(status: int, cause: str) -> Answer:
    return status, _JSON, json.dumps({"error": cause}).encode()


async def serve(config: Config, port: int, *, in_flight: bool = False) -> None:
    """Serves on loopback until a signal; with `in_flight` sessions follow the newest weights."""
    credentials = Credentials.load(config.security)
    async with open_channel(config.controller.address, credentials) as channel:
        stub = operations_pb2_grpc.OperationServiceStub(channel)
        metadata = call_metadata(credentials, config.run.id)
        front = Front(config, stub, metadata, in_flight=in_flight)
        # Starlette has names of its own for the types of ASGI.
        server = bounded_server(front, port=port)  # type: ignore[arg-type]
        try:
            await uvicorn.Server(server).serve()
        finally:
            await front.close()


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
