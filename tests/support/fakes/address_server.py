"""A stand-in for a vLLM server: the routes that an engine at an address asks, as vLLM answers."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import urlsplit

LIMIT_S = 60.0


class AddressServer(ThreadingHTTPServer):
    """One server; a test sets its state, and reads what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.version = "default"
        self.is_paused = False
        self.release = "0.32.0"
        # Statuses in place of a route's own, and the key that routes of tokens ask for.
        self.statuses: dict[str, int] = {}
        self.key = ""
        # Routes that do not answer before the test is over.
        self.silent: set[str] = set()
        self.over = threading.Event()
        self.calls: list[tuple[str, Any]] = []
        # Changes to a reply, and whether replies wait for an abort of their full id.
        self.reply: dict[str, Any] = {}
        self.waits_for_abort = False
        self.aborted: dict[str, threading.Event] = {}
        self.settings: dict[str, Any] = {
            "model_config": {
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
                "quantization": None,
                "dtype": "torch.float32",
                "max_model_len": 4096,
            },
            "parallel_config": {"data_parallel_size": 1},
            "speculative_config": None,
            "lora_config": None,
            "kv_transfer_config": None,
        }

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/server_info":
                return 200, {"vllm_config": self.settings}
            case "/version":
                return 200, {"version": self.release}
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True}
            case "/is_paused":
                return 200, {"is_paused": self.is_paused}
            case "/pause" | "/resume":
                self.is_paused = path == "/pause"
                return 200, {"status": "done"}
            case "/inference/v1/abort_requests":
                for request_id in body["request_ids"]:
                    # As in vLLM, an unknown id is no error.
                    if request_id in self.aborted:
                        self.aborted[request_id].set()
                return 200, None
            case "/inference/v1/generate":
                return self.generated(body)
        return 404, {"detail": "Not Found"}

    def generated(self, body: Any) -> tuple[int, Any]:
        if "token_ids" not in body:
            return 422, {"detail": "token_ids is missing"}
        reason = "length"
        if self.waits_for_abort:
            # The id that vLLM gives the request is not the one that was sent.
            over = self.aborted.setdefault(
                f"generate-tokens-{body['request_id']}", threading.Event()
            )
            assert over.wait(LIMIT_S)
            reason = "abort"
        tokens = [5, 6, 7]
        choice = {
            "token_ids": tokens,
            "logprobs": {
                "content": [{"token_id": token, "logprob": -0.5} for token in tokens]
            },
            "weight_versions": [{"start": 0, "end": 3, "version": self.version}],
            "finish_reason": reason,
            "stop_reason": None,
        }
        scores = [
            None if place == 0 else {str(token): {"logprob": -float(place)}}
            for place, token in enumerate(body["token_ids"])
        ]
        return 200, {"choices": [choice | self.reply], "prompt_logprobs": scores}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AddressServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(json.loads(content) if content else None)

    def _answer(self, body: Any) -> None:
        server = self.server
        path = urlsplit(self.path).path
        server.calls.append((self.path, body))
        if path in server.silent:
            server.over.wait(LIMIT_S)
        key = self.headers.get("Authorization", "")
        if path in server.statuses:
            status = server.statuses[path]
            answer = {"error": "scripted"}
        elif path.startswith("/inference") and server.key and key != server.key:
            status = 401
            answer = {"error": "Unauthorized"}
        else:
            status, answer = server.answer(path, body)
        content = b"" if answer is None else json.dumps(answer).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Overrides the base class's method; writes nothing."""


Server = TypeVar("Server", bound=AddressServer)


@contextlib.contextmanager
def address_server(kind: type[Server] = AddressServer) -> Iterator[Server]:
    """Serves in threads until the end of the block."""
    with kind() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
