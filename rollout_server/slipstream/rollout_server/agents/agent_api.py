"""Answers HTTP requests of agents through ASGI applications, part by part.

Consumes: a request. Produces: the parts of its answer. Waits for: the application. Unblocked by:
the application's next message, or its end.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeAlias

from slipstream.core.template_values import NEED_PARSER
from slipstream.rollout_server.agents.recorder import (
    CHAT_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    AsMessages,
    Recorder,
)
from slipstream.rollout_server.agents.request_rules import (
    SAMPLING_HEADER,
    HttpCall,
    HttpPart,
    Refusal,
    Ruled,
    ServedCall,
    items_of,
    rule,
)

log = logging.getLogger(__name__)

Message: TypeAlias = MutableMapping[str, Any]
Application: TypeAlias = Callable[..., Awaitable[None]]
Headers: TypeAlias = tuple[tuple[str, str], ...]

COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
_JSON: Headers = (("content-type", "application/json"),)
_RETRY: Headers = (("retry-after", "1"),)
_NOT_FOUND, _BROKEN, _BUSY = 404, 500, 503
# Bytes of a request for each token that its prompt may have, and for all the rest. Parsing a larger
# request would delay other episodes, and its prompt is too long anyway.
_BYTES_PER_TOKEN, _OTHER_BYTES = 32, 1 << 16
# Largest part of an answer; a message that carries one must stay below 16 MiB.
_MAX_PART = 4 << 20
_AUTO: dict[str, object] = {MESSAGES_PATH: {"type": "auto"}}


class Answering:
    """Answers HTTP requests of agents with ASGI applications, which sample through a `Recorder`."""

    def __init__(
        self,
        plain: Application,
        with_tools: Application,
        current: ContextVar[tuple[Recorder, ServedCall] | None],
        *,
        as_messages: AsMessages,
        model: str,
        has_tools: bool,
        has_drafts: bool,
    ) -> None:
        """Takes the applications for requests without tools (`plain`) and with tools.

        Both take the recorder and the state of the present call from the context variable
        `current`. `as_messages` converts replies for recorders. `has_tools` says that `with_tools`
        can parse tool calls, `has_drafts` that the engine decodes speculatively.
        """
        self._plain, self._with_tools, self.as_messages = plain, with_tools, as_messages
        self._current, self._model = current, model
        self._has_tools, self._has_drafts = has_tools, has_drafts

    async def answer(self, recorder: Recorder, http: HttpCall) -> AsyncGenerator[HttpPart, None]:
        """Yields the parts of the answer to `http`; `recorder` records the tokens of the reply."""
        path = http.path.partition("?")[0]
        most_tokens = recorder.sampling.max_episode_tokens
        most = _OTHER_BYTES + _BYTES_PER_TOKEN * most_tokens
        try:
            if len(http.body) > most:
                recorder.was_refused = True
                raise Refusal(
                    f"prompt is too long: the request has {len(http.body)} bytes; with "
                    f"sampling.max_episode_tokens = {most_tokens} it may have {most}",
                    code="context_length_exceeded",
                )
            if path in (CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH) and http.method == "POST":
                parts = self._reply(recorder, http, path)
            elif path in (COUNT_PATH, MODELS_PATH):
                model = {"model": self._model}
                body = _encoded(_asked(http.body) | model) if http.body else b""
                exchange = _Exchange(http.method, path, body, asyncio.Event())
                parts = exchange.run(self._plain, copy_context())
            else:
                known = (CHAT_PATH, RESPONSES_PATH, MESSAGES_PATH, COUNT_PATH, MODELS_PATH)
                what = f"{http.method} {path} is no path of agents; there are {', '.join(known)}"
                raise Refusal(what, code="not_found", status=_NOT_FOUND)
            async for part in parts:
                yield part
        except Refusal as refusal:
            yield _error(path, refusal)

    async def _reply(
        self, recorder: Recorder, http: HttpCall, path: str
    ) -> AsyncGenerator[HttpPart, None]:
        """Yields the parts of a reply, or raises Refusal."""
        ruled = self._ruled(path, http.body, recorder)
        previous = recorder.expand(ruled.body) if path == RESPONSES_PATH else None
        body = _encoded(ruled.body)
        recorder.ignored.update(ruled.ignored)
        opened = recorder.open(http, path, is_stream=bool(ruled.body.get("stream")))
        opened.previous = previous
        opened.has_tools = _uses_tools(ruled.body)
        if path == RESPONSES_PATH and ruled.body.get("store") is not False:
            opened.stored_items = items_of(ruled.body)
        context = copy_context()
        context.run(self._current.set, (recorder, opened))
        extra: Headers = ((SAMPLING_HEADER, ruled.told),) if ruled.told else ()
        application = self._with_tools if opened.has_tools else self._plain
        exchange = _Exchange("POST", path, body, opened.hung_up, extra)
        try:
            async for part in exchange.run(application, context):
                if opened.refusal is not None:
                    raise opened.refusal
                opened.status = part.status or opened.status
                opened.body += part.body
                opened.is_whole = part.is_last
                yield part
        finally:
            recorder.close(opened)

    def _ruled(self, path: str, body: bytes, recorder: Recorder) -> Ruled:
        asked = _asked(body)
        auto = _AUTO.get(path, "auto")
        ruled = rule(asked, recorder.sampling, auto=auto, has_drafts=self._has_drafts)
        if _uses_tools(ruled.body) and not self._has_tools:
            raise Refusal(NEED_PARSER)
        if path == MESSAGES_PATH and not ruled.body.get("tools"):
            # vLLM would demand its parser of tool calls for "auto".
            ruled.body.pop("tool_choice", None)
        ruled.body["model"] = self._model
        values, asked_values = recorder.template_values, asked.get("chat_template_kwargs") or {}
        if values and isinstance(asked_values, dict):
            ruled.body["chat_template_kwargs"] = {**values, **asked_values}
        return ruled


def _uses_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") not in ("none", {"type": "none"})


def _asked(body: bytes) -> dict[str, Any]:
    """Returns a request's body parsed as JSON; raises Refusal unless it is an object."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body must be JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refusal(f"the body must be an object, got {type(asked).__name__}")
    return asked


def _encoded(asked: dict[str, Any]) -> bytes:
    try:
        return json.dumps(asked, ensure_ascii=False).encode()
    except RecursionError as error:
        raise Refusal(f"the body must be JSON: {error}") from None
    except UnicodeEncodeError as error:
        raise Refusal(f"the body must be Unicode: {error.reason}") from None


class _Exchange:
    """One request to an ASGI application, and the messages that the application sends back."""

    def __init__(
        self, method: str, path: str, body: bytes, hung_up: asyncio.Event, extra: Headers = ()
    ) -> None:
        """`extra` has more headers for the answer; `hung_up` is set when the client hangs up."""
        self._scope: dict[str, Any] = {
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
        self._body: bytes | None = body
        self._hung_up = hung_up
        self._start: Message | None = None
        self._extra = extra
        self._waiting = bytearray()
        # Whether the application has sent the end of the answer.
        self._is_whole = False
        self._changed = asyncio.Event()

    async def run(
        self, application: Application, context: Context
    ) -> AsyncGenerator[HttpPart, None]:
        """Runs the application in `context`, and yields its answer in parts.

        A part has the bytes that the application has sent since the previous part, up to a limit.
        """
        loop = asyncio.get_running_loop()
        call: Any = application(self._scope, self._receive, self._send)
        work: asyncio.Task[None] = loop.create_task(call, context=context)
        work.add_done_callback(lambda _: self._changed.set())
        has_begun = False
        try:
            while not work.done() or self._waiting:
                if not self._waiting:
                    await self._changed.wait()
                    self._changed.clear()
                    continue
                body = bytes(self._waiting[:_MAX_PART])
                del self._waiting[:_MAX_PART]
                is_last = self._is_whole and not self._waiting
                yield self._part(body, is_first=not has_begun, is_last=is_last)
                has_begun = True
                if is_last:
                    return
        finally:
            await _ended(work)
        if has_begun:
            yield HttpPart(b"", is_last=True)
        elif self._start is not None:
            yield self._part(b"", is_first=True, is_last=True)
        else:
            refusal = Refusal("no answer", code="internal_error", status=_BROKEN)
            yield _error(self._scope["path"], refusal)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._waiting += message.get("body", b"")
            self._is_whole = not message.get("more_body", False)
            self._changed.set()

    def _part(self, body: bytes, *, is_first: bool, is_last: bool) -> HttpPart:
        if not is_first:
            return HttpPart(body, is_last)
        assert self._start is not None, "an application starts its answer before the body"
        status = int(self._start["status"])
        headers = tuple((name.decode(), value.decode()) for name, value in self._start["headers"])
        headers += self._extra + (_RETRY if status == _BUSY else ())
        return HttpPart(body, is_last, status, headers)


async def _ended(work: asyncio.Task[None]) -> None:
    """Cancels the application if it still runs; logs its error, if any, instead of raising it."""
    work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
    except Exception:
        log.exception("an agent's call ended with an error")


def _error(path: str, refusal: Refusal) -> HttpPart:
    """Returns the refusal as an error answer in the format of the API at `path`."""
    kind = "not_found_error" if refusal.status == _NOT_FOUND else "invalid_request_error"
    if refusal.status >= _BROKEN:
        kind = "api_error"
    error: dict[str, object] = {"type": kind, "message": refusal.message}
    if path.startswith(MESSAGES_PATH):
        body: dict[str, object] = {"type": "error", "error": error}
    else:
        body = {"error": error | {"param": refusal.param, "code": refusal.code}}
    return HttpPart(json.dumps(body).encode(), True, refusal.status, _JSON)
