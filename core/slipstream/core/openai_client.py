"""Clients of OpenAI's API, for servers that may be slow, broken or hostile."""

import asyncio
import contextlib
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.machine.address import is_loopback
from slipstream.core.machine.files import read_regular

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Most characters of an answer or error that a message shows.
MAX_SHOWN = 200


def openai_client(
    base_url: str, *, api_key: str = "none", timeout_s: float, max_retries: int, most_bytes: int
) -> "AsyncOpenAI":
    """Returns a client of the OpenAI API at `base_url`, for calls with JSON answers.

    A call fails if its whole answer takes longer than `timeout_s` or has more than `most_bytes`.
    The client retries a call up to `max_retries` times after an exceeded limit, a broken
    connection, an answer that is no JSON, or status 408, 409, 429 or 5xx. It follows no redirect
    and asks no proxy for an address on loopback, so texts go only to `base_url`. Raises ConfigError
    for a `base_url` that is no URL, for an empty key, in whose place openai would send that of
    OPENAI_API_KEY, or without the package openai.
    """
    if re.fullmatch(r"https?://[^\s/?#]+(/[!-~]*)?", base_url) is None:
        what = "the address of an API is http://HOST:PORT/v1, or with https"
        raise ConfigError(f"{what}, got {base_url!r}")
    if not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError(f"the key of the API at {base_url} must be one line of ASCII, not empty")
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the API at {base_url} needs the package openai: pip install openai"
        ) from error
    # Without a transport of their own these take that of no proxy, whatever HTTP_PROXY says.
    is_own_host = is_loopback(urlsplit(base_url).hostname or "")
    mounts = dict.fromkeys(("http://", "https://") if is_own_host else ())
    # httpx, or what the package has in its place.
    http: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__)

    class Bounded(openai.DefaultAsyncHttpxClient):  # type: ignore[misc]
        async def send(self, request: Any, **options: Any) -> Any:  # noqa: ANN401 - httpx's own
            # Few compressed bytes may stand for any number of others.
            request.headers["accept-encoding"] = "identity"
            options |= {"stream": True, "follow_redirects": False}
            try:
                async with asyncio.timeout(timeout_s):
                    response: Any = await super().send(request, **options)
                    encoding = response.headers.get("content-encoding")
                    body = bytearray()
                    try:
                        if encoding not in (None, "identity"):
                            what = f"its answer is encoded as {encoding[:20]}"
                            raise http.ReadError(what, request=request)
                        async for part in response.aiter_raw():
                            body += part
                            if len(body) > most_bytes:
                                what = f"its answer has more than {most_bytes} bytes"
                                raise http.ReadError(what, request=request)
                    finally:
                        await response.aclose()
                    if response.is_success:
                        json.loads(body)
            except (ValueError, RecursionError) as error:
                # A proxy may answer in the place of a server that is away.
                what = f"its answer is no JSON: {type(error).__name__}: {error}"
                raise http.ReadError(what, request=request) from None
            except TimeoutError:
                what = f"no whole answer within {timeout_s:g} s"
                raise http.ReadTimeout(what, request=request) from None
            headers = [*response.headers.items(), ("content-type", "application/json")]
            return http.Response(
                response.status_code, headers=dict(headers), content=bytes(body), request=request
            )

    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        timeout=timeout_s,
        max_retries=max_retries,
        http_client=Bounded(mounts=mounts),
    )


@contextlib.contextmanager
def faults_as(kind: type[Exception], name: str) -> Iterator[None]:
    """Re-raises others than SlipstreamError as a `kind`, in one line that begins with `name`."""
    import openai

    try:
        yield
    except SlipstreamError:
        raise
    except (openai.OpenAIError, ValueError, TypeError, AttributeError, RecursionError) as error:
        # The package does not check the form of answers: most errors come from malformed ones.
        message = in_one_line(f"{type(error).__name__}: {error} {error.__cause__ or ''}")
        raise kind(f"{name} failed: {message}") from error


def in_one_line(text: str) -> str:
    """Returns the first `MAX_SHOWN` characters of `text`, without line breaks."""
    return " ".join(text.split())[:MAX_SHOWN]


def key_in(path: str | Path | None, name: str) -> str:
    """Returns the key in the file `path`, "none" for None; raises ConfigError without one."""
    if path is None:
        return "none"
    try:
        key = read_regular(Path(path)).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"{name} {path} is empty: put the key into it")
    return key
