"""What the HTTP process of a client's own loop refuses, and when."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pyarrow
import pytest
from slipstream.client.agent_gateway import LOOPBACK
from slipstream.extensions.tinker import front, wire_pb2
from slipstream.extensions.tinker.front import MAX_BODY_BYTES, MAX_OPEN, Front
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
    path: str, body: bytes | dict = b"", headers: Sequence = KEY, *, packed: bool = False
) -> tuple[int, str, list[pb.Operation]]:
    """Status, error and operations of a request; without KEY its body would never come."""
    sent: list[dict[str, Any]] = []
    controller = Controller()
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    if packed:
        body = pyarrow.compress(body, codec="zstd", asbytes=True)
        assert len(body) < 100_000
        headers = [*headers, (b"content-encoding", b"zstd")]

    async def receive() -> dict[str, Any]:
        assert list(headers[: len(KEY)]) == KEY
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    served = Front(small_config(), controller, (), in_flight=False)
    scope = {"type": "http", "method": "POST", "path": f"/api/v1/{path}", "headers": headers}
    await served(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]).get("error", ""), controller.taken


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_session", b"[" * 200_000),
        ("optim_step", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ("optim_step", {"seq_id": "x"}),
        ("forward_backward", b"\xff"),
        ("forward_backward", b"\x0a\x01m\xff"),
        ("asample", SAMPLE | {"sampling_session_id": 5}),
        ("asample", SAMPLE | {"prompt": {"chunks": ["text"]}}),
        ("asample", SAMPLE | {"sampling_params": [1]}),
    ],
)
async def test_a_request_of_another_form_is_malformed(path: str, body: bytes | dict) -> None:
    status, error, taken = await answered(path, body)
    assert (status, taken) == (400, [])
    assert error.startswith("the request is malformed: ")


@pytest.mark.parametrize("numbers", [[1], "x", 5])
async def test_an_operation_of_another_form_fails_in_its_turn(numbers: object) -> None:
    status, _, (operation,) = await answered("optim_step", MODEL | {"adam_params": numbers})
    assert status == 200
    assert "the request is malformed" in operation.refused.cause


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("RESOURCE_EXHAUSTED", 429),
        ("UNAVAILABLE", 503),
        ("INTERNAL", 500),
    ],
)
async def test_a_refusal_of_the_controller_has_a_status_by_which_the_sdk_asks_again_or_not(
    code: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode[code], nothing, nothing, "a cause")

    monkeypatch.setattr(Controller, "Submit", refuse)
    found = await answered("optim_step", MODEL | {"adam_params": {}})
    assert found == (status, "a cause", [])


@pytest.mark.parametrize(
    "headers",
    [KEY[:1], KEY[1:], [(b"host", b"evil.example"), KEY[1]], [KEY[0], (b"x-api-key", b"\xff")]],
)
async def test_a_request_without_a_key_is_refused_before_its_body(headers: list) -> None:
    status, error, _ = await answered("forward", headers=headers)
    assert (status, "a request needs an api_key" in error) == (401, True)


# The forward_backward of `test_operations.SENT`, as the SDK packs it if it is told to.
ZIPPED_PASS = bytes.fromhex(
    "28b52ffd602000150600520a272c70499b0384f5ff3c6198aaaa6a4404afb957d7286a13d16253556fc1d773646aa865"
    "ecbca45256653a5223296fc1b8e36808ee2d202a6d6de0bc8a090a8288d689e39d199a529a90956883d2074eb596356c"
    "35c67280b3a59986a7e8503394a3bc300bf4532dfcd57f098aa15e2b2b0d68a6b1d5ace551ff3bd24ac351c23cc18708"
    "7627b4ffecbff17f213dd049af8802963c6e92e0cd4e0177070e004415002826e21d42f88850730c2585203c303018c4"
    "2320436060a0446566038002"
)


async def test_a_pass_in_zstd_is_the_pass() -> None:
    headers = [*KEY, (b"content-encoding", b"zstd")]
    status, _, (operation,) = await answered("forward_backward", ZIPPED_PASS, headers)
    assert (status, operation.id) == (200, "s1:train:0:3:forward_backward")
    (sequence,) = operation.compute.sequences
    assert sequence.token_ids == b"\1\0\0\0\2\0\0\0\3\0\0\0"


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [(b"gzip", b"", (415, "or in zstd, not in gzip")), (b"zstd", b"{}", (400, "is no zstd"))],
)
async def test_a_body_that_is_packed_otherwise_is_refused(encoding, body, said) -> None:
    headers = [*KEY, (b"content-encoding", encoding)]
    status, error, taken = await answered("forward_backward", body, headers)
    assert (status, said[1] in error, taken) == (said[0], True, [])


LARGE_PASS = wire_pb2.ForwardBackwardRequest(model_id="m", seq_id=4, loss_fn="x" * MAX_BODY_BYTES)
LARGE_SAVE = {"model_id": "m", "path": 'x"seq_id":7,' * (MAX_BODY_BYTES // 10), "seq_id": 4}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [("save_weights", LARGE_SAVE), ("forward_backward", LARGE_PASS.SerializeToString())],
)
async def test_an_operation_that_is_too_large_fails_in_its_turn(path, body, packed) -> None:
    status, _, (operation,) = await answered(path, body, packed=packed)
    assert (status, operation.id) == (200, f"m:4:{path}")
    assert operation.refused.cause.startswith("a request has at most 25165824 bytes, got")


@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_is_read_up_to_a_size(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(front, "MAX_READ_BYTES", MAX_BODY_BYTES)
    status, error, taken = await answered("save_weights", bytes(MAX_BODY_BYTES + 1), packed=packed)
    assert (status, taken) == (400, [])
    assert "a request has at most 25165824 bytes, got 25" in error


async def test_a_key_has_a_number_of_requests_at_once() -> None:
    statuses: list[int] = []
    hold = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await hold.wait()
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        if "status" in message:
            statuses.append(message["status"])

    served = Front(small_config(), Controller(), (), in_flight=False)
    scope = {"type": "http", "method": "GET", "path": "/api/v1/healthz", "headers": KEY}
    async with asyncio.TaskGroup() as group:
        for _ in range(MAX_OPEN + 1):
            group.create_task(served(scope, receive, send))
        other = [KEY[0], (b"x-api-key", b"tml-other")]
        group.create_task(served(scope | {"headers": other}, receive, send))
        while not statuses:
            await asyncio.sleep(0)
        assert statuses == [429]
        hold.set()
    assert statuses == [429, *[200] * (MAX_OPEN + 1)]
    await served(scope, receive, send)
    assert statuses[-1] == 200
