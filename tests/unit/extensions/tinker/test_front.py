"""What the HTTP process of a client's own loop refuses, and when."""

import json
from typing import Any

import pytest
from slipstream.client.agents.gateway import LOOPBACK
from slipstream.extensions.tinker.front import Front
from slipstream.v1 import operations_pb2 as pb
from support.fakes.small_configs import small_config

KEY = [(b"host", LOOPBACK.encode()), (b"x-api-key", b"tml-any")]
MODEL = {"model_id": "m", "seq_id": 1}
SAMPLE: dict[str, Any] = {
    "sampling_session_id": "s+",
    "seq_id": 1,
    "prompt": {"chunks": [{"tokens": [1]}]},
}


class Controller:
    """Takes every operation and keeps it."""

    def __init__(self) -> None:
        self.taken: list[pb.Operation] = []

    async def Submit(self, operation: pb.Operation, **_: object) -> None:  # noqa: N802
        self.taken.append(operation)


async def answered(
    path: str, body: bytes, headers: list[tuple[bytes, bytes]] = KEY
) -> tuple[int, dict[str, Any], Controller]:
    """Status and answer of a request; without KEY its body would never come."""
    sent: list[dict[str, Any]] = []
    controller = Controller()

    async def receive() -> dict[str, Any]:
        assert headers is KEY
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    front = Front(small_config(), controller, (), in_flight=False)
    await front({"type": "http", "path": f"/api/v1/{path}", "headers": headers}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]), controller


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_session", b"[" * 200_000),
        ("optim_step", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ("asample", json.dumps(SAMPLE | {"sampling_session_id": 5}).encode()),
        ("asample", json.dumps(SAMPLE | {"prompt": {"chunks": ["text"]}}).encode()),
        ("asample", json.dumps(SAMPLE | {"sampling_params": [1]}).encode()),
    ],
)
async def test_a_request_of_another_form_is_malformed(path: str, body: bytes) -> None:
    status, answer, controller = await answered(path, body)
    assert (status, controller.taken) == (400, [])
    assert answer["error"].startswith("the request is malformed: ")


@pytest.mark.parametrize("numbers", [[1], "x", 5])
async def test_an_operation_of_another_form_fails_in_its_turn(numbers: object) -> None:
    body = json.dumps(MODEL | {"adam_params": numbers}).encode()
    status, _, controller = await answered("optim_step", body)
    assert status == 200
    (operation,) = controller.taken
    assert "the request is malformed" in operation.refused.cause


@pytest.mark.parametrize(
    "headers",
    [KEY[:1], KEY[1:], [(b"host", b"evil.example"), KEY[1]], [KEY[0], (b"x-api-key", b"\xff")]],
)
async def test_a_request_without_a_key_is_refused_before_its_body(headers: list) -> None:
    status, answer, _ = await answered("forward", b"", headers)
    assert (status, "a request needs an api_key" in answer["error"]) == (401, True)
