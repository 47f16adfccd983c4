"""Answers HTTP requests of agents through ASGI applications, part by part.

Consumes: a request. Produces: the parts of its answer. Waits for: the application. Unblocked by:
the application's next message, or its end.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.core.template_values import NEED_PARSER
from slipstream.rollout_server.agents.recorder import (
    BUSY,
    CHAT_PATH,
    CURRENT,
    MESSAGES_PATH,
    RESPONSES_PATH,
    Recorder,
)
from slipstream.rollout_server.agents.request_rules import (
    SAMPLING_HEADER,
    Refusal,
    ServedCall,
    items_of,
    rule,
)
from slipstream.v1.environment_pb2 import AgentCall, ReplyPart

log = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[..., Awaitable[None]]

# The name of the only model; requests may name any.
MODEL = "policy"
COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
METHODS = dict.fromkeys((CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, COUNT_PATH), "POST")
METHODS[MODELS_PATH] = "GET"
_NOT_FOUND = 404
_BROKEN = 500
# Bytes of a request for each token that its prompt may have, and for all the rest. Parsing a larger
# request would delay other episodes, and its prompt is too long anyway.
_BYTES_PER_TOKEN = 32
_OTHER_BYTES = 1 << 16
# Largest part of an answer; a message that carries one must stay below 16 MiB.
_MAX_PART = 4 << 20
# Seconds without a part after which a stream gets a comment: clients give up a silent one.
QUIET_S = 15.0
# Most characters of a header of ours.
_MAX_HEADER = 1000


@dataclass(frozen=True)
class Answering:
    """Answers HTTP requests of agents with ASGI applications, which sample through a `Recorder`."""

    # The applications for requests without tools and with tools, None if the run parses no calls.
    # Both take the present call from `CURRENT`.
    plain: Application
    with_tools: Application | None
    # The fields that the applications read of a request, by its path, and what the template reads.
    fields: Mapping[str, set[str]]
    variables: frozenset[str]
    # Whether the engine decodes speculatively.
    has_drafts: bool

    async def answer(self, recorder: Recorder, http: AgentCall) -> AsyncGenerator[ReplyPart, None]:
        """Yields the parts of the answer to `http`; `recorder` records the tokens of the reply.

        The parts lack the names of the episode and of the call.
        """
        path = http.path.partition("?")[0].rstrip("/")
        listed, _, name = path.partition(f"{MODELS_PATH}/")
        most_tokens = recorder.sampling.max_episode_tokens
        max_bytes = _OTHER_BYTES + _BYTES_PER_TOKEN * most_tokens
        try:
            if len(http.body) > max_bytes:
                recorder.was_refused = True
                raise Refusal(
                    f"prompt is too long: the request has {len(http.body)} bytes; with "
                    f"sampling.max_episode_tokens = {most_tokens} it may have {max_bytes}",
                    code="context_length_exceeded",
                )
            if http.method == "GET" and name and not listed:
                # Any name stands for the policy.
                model_parts = _exchange(self.plain, copy_context(), "GET", MODELS_PATH, b"")
                policy, *_ = json.loads(b"".join([part.body async for part in model_parts]))["data"]
                yield _whole(policy | {"id": name}, 200)
                return
            if METHODS.get(path) != http.method:
                served_paths = ", ".join(f"{method} {path}" for path, method in METHODS.items())
                what = f"{http.method} {path} is no path of agents; there are {served_paths}"
                raise Refusal(what, code="not_found", status=_NOT_FOUND)
            if path in (CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH):
                parts = self._reply(recorder, http, path)
            else:
                body = b""
                if http.body:
                    request = _asked(http.body)
                    if request.get("tools") and self.with_tools is None:
                        raise Refusal(NEED_PARSER)
                    body = _encoded(self._filled(recorder, request))
                application = self.with_tools or self.plain
                parts = _exchange(application, copy_context(), http.method, path, body)
            async for part in parts:
                yield part
        except Refusal as refusal:
            yield _error(path, refusal)

    async def _reply(
        self, recorder: Recorder, http: AgentCall, path: str
    ) -> AsyncGenerator[ReplyPart, None]:
        served, unmet = rule(
            self._filled(recorder, _asked(http.body)),
            recorder.sampling,
            fields=self.fields[path],
            variables=self.variables,
            has_drafts=self.has_drafts,
        )
        if not served.get("tools"):
            # vLLM refuses an empty list, and demands its parser of tool calls for a choice.
            served = {name: served[name] for name in served if name not in ("tools", "tool_choice")}
        asks_none = served.get("tool_choice") in ("none", {"type": "none"})
        uses_tools = "tools" in served and not asks_none
        if uses_tools and self.with_tools is None:
            raise Refusal(NEED_PARSER)
        previous = recorder.expand(served) if path == RESPONSES_PATH else None
        body = _encoded(served)
        recorder.ignored.update(unmet.keys())
        opened = recorder.open(http, path)
        opened.previous = previous
        if path == RESPONSES_PATH and served.get("store") is not False:
            opened.stored_items = items_of(served)
        context = copy_context()
        context.run(CURRENT.set, (recorder, opened))
        application = self.with_tools if uses_tools and self.with_tools else self.plain
        recorder.recall(opened, served)
        exchange = _exchange(application, context, "POST", path, body)
        try:
            async with contextlib.aclosing(_fresh(opened, exchange)) as parts:
                async for part in parts:
                    if opened.refusal is not None:
                        yield _error(path, opened.refusal, opened.body)
                        return
                    if part.status and unmet:
                        header = "; ".join(f"{name}={value}" for name, value in unmet.items())
                        part.headers.add(name=SAMPLING_HEADER, value=header[:_MAX_HEADER])
                    if part.status:
                        opened.status = part.status
                        opened.headers = tuple((h.name, h.value) for h in part.headers)
                    opened.body += part.body
                    if part.is_last:
                        await recorder.keep(opened)
                    yield part
            if opened.is_recovered:
                async for part in _recorded(opened):
                    yield part
        finally:
            recorder.close(opened)

    def _filled(self, recorder: Recorder, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the request with the name of the model and the environment's template values."""
        filled = {**request, "model": MODEL}
        values = recorder.template_values
        asked_values = request.get("chat_template_kwargs") or {}
        if values and isinstance(asked_values, dict):
            filled["chat_template_kwargs"] = {**values, **asked_values}
        return filled


def _asked(body: bytes) -> dict[str, Any]:
    """Returns a request's body parsed as JSON; raises Refusal unless it is an object."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body must be JSON: {error}") from None
    if not isinstance(request, dict):
        raise Refusal(f"the body must be an object, got {type(request).__name__}")
    return request


def _encoded(request: dict[str, Any]) -> bytes:
    try:
        return json.dumps(request, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Refusal(f"the body must be JSON: {error}") from None
    except UnicodeEncodeError as error:
        raise Refusal(f"the body must be Unicode: {error.reason}") from None


class _Exchange:
    """One request to an application: gives it the body, and holds what it has sent of its answer.

    The methods `receive` and `send` are the application's, by ASGI.
    """

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        # Set when the application sends or ends; set when nobody takes its answer any more.
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        # The first part, with status and headers.
        self.first = ReplyPart()
        # Bytes that have been sent and not been taken, and whether they are the last.
        self.waiting = bytearray()
        self._is_whole = False
        self._is_stream = False

    async def receive(self) -> Message:
        if self._body is not None:
            body = self._body
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.first.status = int(message["status"])
            for name, value in message["headers"]:
                self.first.headers.add(name=name.decode(), value=value.decode())
                self._is_stream = self._is_stream or value.startswith(b"text/event-stream")
            self.changed.set()
        elif message["type"] == "http.response.body":
            self.waiting.extend(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)
            self.changed.set()

    async def wait(self) -> None:
        """Waits until the application sends or ends; a silent stream gets a comment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S if self._is_stream else None) as quiet:
                await self.changed.wait()
        if quiet.expired():
            self.waiting.extend(b": a reply is being sampled\n\n")
        self.changed.clear()

    def fill(self, part: ReplyPart) -> None:
        """Moves waiting bytes into `part`, up to a limit."""
        assert self.first.status, "an application starts its answer before the body"
        part.body = bytes(self.waiting[:_MAX_PART])
        del self.waiting[:_MAX_PART]
        part.is_last = self._is_whole and not self.waiting


async def _exchange(
    application: Application, context: Context, method: str, path: str, body: bytes
) -> AsyncGenerator[ReplyPart, None]:
    """Runs an application in `context` with one request, and yields its answer in parts.

    A part has the bytes that the application has sent since the previous part, up to a limit. The
    application's own error becomes the refusal of the call in `context`, and is logged unless the
    call has one. If the client hangs up, close the generator: it cancels the application.
    """
    _, opened = context.get(CURRENT) or (None, None)
    broken = Refusal("no answer", code="internal_error", status=_BROKEN)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    exchange = _Exchange(body)
    call: Any = application(scope, exchange.receive, exchange.send)
    work: asyncio.Task[None] = asyncio.get_running_loop().create_task(call, context=context)
    work.add_done_callback(lambda _: exchange.changed.set())
    part = exchange.first
    try:
        while not work.done() or exchange.waiting:
            if not exchange.waiting:
                await exchange.wait()
                continue
            exchange.fill(part)
            yield part
            if part.is_last:
                return
            part = ReplyPart()
    finally:
        # Tasks of the application's own hear of the end in this way alone.
        exchange.ended.set()
        work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
        except Exception:
            if opened is None or not (opened.refusal or opened.is_recovered):
                log.exception("an agent's call ended with an error")
            if opened is not None and not opened.is_recovered:
                opened.refusal = opened.refusal or broken
    if exchange.first.status:
        part.is_last = True
        yield part
    else:
        yield _error(path, broken)


async def _fresh(
    opened: ServedCall, exchange: AsyncGenerator[ReplyPart, None]
) -> AsyncGenerator[ReplyPart, None]:
    """Yields an application's parts, none of them if the call is answered from its record.

    While that is open the parts wait: an application may begin its answer before it has a prompt.
    """
    waiting: list[ReplyPart] = []
    async with contextlib.aclosing(exchange):
        async for part in exchange:
            if opened.is_recovered:
                return
            waiting.append(part)
            if opened.record is None or opened.refusal is not None:
                for waiting_part in waiting:
                    yield waiting_part
                waiting.clear()
    for waiting_part in waiting:
        yield waiting_part


async def _recorded(opened: ServedCall) -> AsyncGenerator[ReplyPart, None]:
    """Yields the answer that the record of a call has, as its client got it before."""
    record = opened.record
    assert record is not None
    opened.status = record.status
    opened.headers = record.headers
    opened.body[:] = record.body
    for start in range(0, max(len(record.body), 1), _MAX_PART):
        part = ReplyPart(body=record.body[start : start + _MAX_PART])
        if start == 0:
            part.status = record.status
            for name, value in record.headers:
                part.headers.add(name=name, value=value)
        part.is_last = start + _MAX_PART >= len(record.body)
        yield part


def _error(path: str, refusal: Refusal, sent: bytes | bytearray = b"") -> ReplyPart:
    """Returns the error of the API at `path`: an answer, or after `sent` the last of its events."""
    kind = "not_found_error" if refusal.status == _NOT_FOUND else "invalid_request_error"
    if refusal.status >= _BROKEN:
        kind = "api_error"
    error: dict[str, object] = {"type": kind, "message": refusal.message}
    if path.startswith(MESSAGES_PATH):
        body: dict[str, object] = {"type": "error", "error": error}
    else:
        body = {"error": error | {"param": refusal.param, "code": refusal.code}}
    if not sent:
        return _whole(body, refusal.status)
    body |= {"type": "error", "sequence_number": sent.count(b"\n\nevent: ") + 1}
    event = f"event: error\ndata: {json.dumps(body)}\n\n"
    return ReplyPart(body=event.encode(), is_last=True)


def _whole(body: Mapping[str, object], status: int) -> ReplyPart:
    part = ReplyPart(body=json.dumps(body).encode(), is_last=True, status=status)
    part.headers.add(name="content-type", value="application/json")
    if status == BUSY:
        part.headers.add(name="retry-after", value="1")
    return part
