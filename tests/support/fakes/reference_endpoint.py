"""A server with the part of vLLM's API that answers for a reference model, in threads."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.rigs.waiting import LIMIT_S

VOCAB = 32


def position(token: int, place: int, top_k: int) -> dict[str, Any]:
    """What it says of one token: likely ones follow `place`, each half as likely as the last."""
    likely = {
        str((place + number) % VOCAB): {
            "logprob": -0.7 * (number + 1),
            "rank": number + 1,
        }
        for number in range(top_k)
    }
    return {str(token): {"logprob": -5.0, "rank": top_k + 7}} | likely


class ReferenceEndpoint:
    """Answers like vLLM; `answers` are taken first, each a status and a body.

    `change` changes what it says of a prompt. `texts` is what tokens mean here.
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = []
        self.change: Callable[[list[Any]], list[Any] | None] = lambda rows: rows
        self.texts: Callable[[list[int]], str] = str
        self.max_model_len = 4096
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.hold = threading.Event()
        self.hold.set()
        self._lock = threading.Lock()
        self.url = ""

    def completion(self, body: dict[str, Any]) -> tuple[int, object]:
        with self._lock:
            self.asked.append(body)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            answer = self.answers.pop(0) if self.answers else None
        self.hold.wait(LIMIT_S)
        with self._lock:
            self.open -= 1
        if answer is not None:
            return answer
        top_k = body["prompt_logprobs"]
        rows = [
            None if not place else position(token, place, top_k)
            for place, token in enumerate(body["prompt"])
        ]
        return 200, {"choices": [{"prompt_logprobs": self.change(rows)}]}

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path == "/v1/models":
            model = {
                "id": "teacher",
                "object": "model",
                "created": 1,
                "owned_by": "test",
            }
            return 200, {"data": [model | {"max_model_len": self.max_model_len}]}
        if path == "/detokenize":
            return 200, {"prompt": self.texts(body["tokens"])}
        assert path == "/v1/completions"
        return self.completion(body)


@contextmanager
def reference_endpoint() -> Iterator[ReferenceEndpoint]:
    """Serves on a loopback port."""
    endpoint = ReferenceEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(
                json.loads(self.rfile.read(int(self.headers["content-length"])))
            )

        def answer(self, body: dict[str, Any]) -> None:
            endpoint.keys.append(self.headers["authorization"])
            status, answer = endpoint.reply(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
