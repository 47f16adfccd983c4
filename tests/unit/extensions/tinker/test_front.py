"""What the HTTP process of a client's own loop refuses, and when."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pyarrow
import pytest
from slipstream.client.agent_gateway import LOOPBACK
from slipstream.extensions.tinker import bodies, wire_pb2
from slipstream.extensions.tinker.bodies import MAX_BODY_BYTES
from slipstream.extensions.tinker.front import MAX_OPEN, Front
from slipstream.extensions.tinker.owners import owner_of_key
from slipstream.v1 import operations_pb2 as pb
from support.fakes.small_configs import small_config
from support.rigs.loop_client import LoopClient

KEY = [(b"host", LOOPBACK.encode()), (b"x-api-key", b"tml-any")]
CONFIG = small_config()
# Alike in all processes of the tests, which are named by them.
SESSION = f"s{owner_of_key(b'tml-any', CONFIG.run.name)}{0:016x}"
M = f"{SESSION}:train:0"
MODEL = {"model_id": M, "seq_id": 1}
SAMPLE: dict[str, Any] = {
    "sampling_session_id": f"{SESSION}:sample:0+",
    "seq_id": 1,
    "prompt": {"chunks": [{"tokens": [1]}]},
    "sampling_params": {},
}


def scope_of(path: str, headers: Sequence, *, method: str = "GET") -> dict[str, Any]:
    """What ASGI says of a request."""
    address = {"path": f"/api/v1/{path}", "query_string": b""}
    return {"type": "http", "method": method, "headers": headers} | address


class Controller:
    """Takes every operation and keeps it."""

    def __init__(self) -> None:
        self.taken: list[pb.Operation] = []

    async def Submit(self, operation: pb.Operation, **_: object) -> None:  # noqa: N802
        self.taken.append(operation)


async def answered(
    path: str,
    body: bytes | dict = b"",
    headers: Sequence = KEY,
    *,
    packed: bool = False,
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

    served = Front(CONFIG, controller, (), in_flight=False)
    await served(scope_of(path, headers, method="POST"), receive, send)
    return (
        sent[0]["status"],
        json.loads(sent[1]["body"]).get("error", ""),
        controller.taken,
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_session", b"[" * 200_000),
        ("optim_step", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ("optim_step", MODEL | {"seq_id": [1], "adam_params": {}}),
        ("forward_backward", b"\xff"),
        ("forward_backward", b"\x0a\x01m\xff"),
        ("asample", SAMPLE | {"prompt": 5}),
        ("asample", SAMPLE | {"prompt": {"chunks": ["text"]}}),
        ("asample", SAMPLE | {"sampling_params": [1]}),
    ],
)
async def test_a_request_of_another_form_is_malformed(
    path: str, body: bytes | dict
) -> None:
    status, error, headers_taken = await answered(path, body)
    assert (status, headers_taken) == (400, [])
    assert error.startswith("the request is malformed: ")


@pytest.mark.parametrize("numbers", [[1], "x", 5])
async def test_an_operation_of_another_form_fails_in_its_turn(numbers: object) -> None:
    status, _, (operation,) = await answered(
        "optim_step", MODEL | {"adam_params": numbers}
    )
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
    answer = await answered("optim_step", MODEL | {"adam_params": {}})
    assert answer == (status, "a cause", [])


@pytest.mark.parametrize(
    "headers",
    [
        KEY[:1],
        KEY[1:],
        [(b"host", b"evil.example"), KEY[1]],
        [KEY[0], (b"x-api-key", b"\xff")],
    ],
)
async def test_a_request_without_a_key_is_refused_before_its_body(
    headers: list,
) -> None:
    status, error, _ = await answered("forward", headers=headers)
    assert (status, "a request needs an api_key" in error) == (401, True)


async def test_a_pass_in_zstd_is_the_pass() -> None:
    client = LoopClient(0)
    client.model = M
    inputs = {"weights": [1.0] * 3}
    datum = ([1, 2, 3], [2, 3, 4], inputs)
    sent = client.passed([datum], "cross_entropy", number=3)
    status, _, (operation,) = await answered("forward_backward", sent, packed=True)
    assert (status, operation.id) == (200, f"{M}:3:forward_backward")
    (sequence,) = operation.compute.sequences
    assert sequence.token_ids == b"\1\0\0\0\2\0\0\0\3\0\0\0"


@pytest.mark.parametrize(
    ("encoding", "body", "said"),
    [
        (b"gzip", b"", (415, "or in zstd, not in gzip")),
        (b"zstd", b"{}", (400, "is no zstd")),
    ],
)
async def test_a_body_that_is_packed_otherwise_is_refused(encoding, body, said) -> None:
    headers = [*KEY, (b"content-encoding", encoding)]
    status, error, headers_taken = await answered("forward_backward", body, headers)
    assert (status, said[1] in error, headers_taken) == (said[0], True, [])


LARGE_PASS = wire_pb2.ForwardBackwardRequest(
    model_id=M, seq_id=4, loss_fn="x" * MAX_BODY_BYTES
)
LARGE_SAVE = {
    "model_id": M,
    "path": 'x"seq_id":7,' * (MAX_BODY_BYTES // 10),
    "seq_id": 4,
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("save_weights", LARGE_SAVE),
        ("forward_backward", LARGE_PASS.SerializeToString()),
    ],
)
async def test_an_operation_that_is_too_large_fails_in_its_turn(
    path, body, packed
) -> None:
    status, _, (operation,) = await answered(path, body, packed=packed)
    assert (status, operation.id) == (200, f"{M}:4:{path}")
    assert operation.refused.cause.startswith(
        "a request has at most 25165824 bytes, got"
    )


@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_is_read_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(bodies, "MAX_READ_BYTES", MAX_BODY_BYTES)
    status, error, headers_taken = await answered(
        "save_weights", bytes(MAX_BODY_BYTES + 1), packed=packed
    )
    assert (status, headers_taken) == (400, [])
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

    served = Front(CONFIG, Controller(), (), in_flight=False)
    scope = scope_of("healthz", KEY)
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


OTHER = f"s{owner_of_key(b'tml-other', CONFIG.run.name)}{0:016x}"
OTHER_MODEL = f"{OTHER}:train:0"
OTHER_STATE = f"tinker://{OTHER_MODEL}/weights/x"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"session_id": OTHER, "model_seq_id": 0}),
        ("optim_step", {"model_id": OTHER_MODEL, "seq_id": 1, "adam_params": {}}),
        (
            "forward_backward",
            wire_pb2.ForwardBackwardRequest(model_id=OTHER_MODEL, seq_id=1),
        ),
        ("forward", wire_pb2.ForwardBackwardRequest(model_id=OTHER_MODEL, seq_id=1)),
        ("save_weights", {"model_id": OTHER_MODEL, "seq_id": 1}),
        ("load_weights", MODEL | {"path": OTHER_STATE, "optimizer": True}),
        (
            "load_weights",
            MODEL | {"path": f"tinker://{OTHER_MODEL}/newest", "optimizer": True},
        ),
        ("create_sampling_session", {"session_id": SESSION, "model_path": OTHER_STATE}),
        ("create_sampling_session", {"session_id": OTHER}),
        ("asample", SAMPLE | {"sampling_session_id": f"{OTHER}:sample:0"}),
        (
            "asample",
            SAMPLE | {"sampling_session_id": f"{SESSION}:sample:0+{OTHER_STATE}"},
        ),
        (
            "asample",
            SAMPLE | {"sampling_session_id": f"{SESSION}:sample:0+{OTHER}:sample:0"},
        ),
        ("retrieve_future", {"request_id": f"{OTHER_MODEL}:1:optim_step"}),
        ("session_heartbeat", {"session_id": OTHER}),
        ("get_info", {"model_id": OTHER_MODEL}),
        (f"sessions/{OTHER}/finish", {}),
        (f"samplers/{OTHER}:sample:0", {}),
        (f"training_runs/{OTHER_MODEL}/checkpoints/weights/x", {}),
        ("weights_info", {"tinker_path": OTHER_STATE}),
    ],
)
async def test_what_is_of_another_key_is_refused(path: str, body: Any) -> None:
    data = body if isinstance(body, dict) else body.SerializeToString()
    status, error, operations = await answered(path, data)
    assert (status, operations) == (403, [])
    assert "is of another api_key" in error


async def test_an_id_that_the_server_did_not_give_is_none() -> None:
    body = MODEL | {"model_id": "s1:train:0"}
    status, error, operations = await answered("optim_step", body)
    assert (status, operations) == (404, [])
    assert error == "s1:train:0 is no id that this server gave"


async def test_half_written_bodies_share_one_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 3000)
    served = Front(CONFIG, Controller(), (), in_flight=False)
    budget = served._bodies
    stalled: list[asyncio.Queue[bytes]] = []
    statuses: dict[str, int] = {}

    def call(name: str, parts: asyncio.Queue[bytes]) -> Any:
        async def receive() -> dict[str, Any]:
            part = await parts.get()
            return {"type": "http.request", "body": part, "more_body": bool(part)}

        async def send(message: dict[str, Any]) -> None:
            statuses.setdefault(name, message.get("status", 0))

        key = f"tml-{name}".encode()
        headers = [KEY[0], (b"x-api-key", key)]
        return served(scope_of("healthz", headers), receive, send)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            parts: asyncio.Queue[bytes] = asyncio.Queue()
            stalled.append(parts)
            calling = call(str(number), parts)
            group.create_task(calling)
            parts.put_nowait(b"x" * 1000)
            expected_bytes = 1000 * (number + 1)
            while budget.held_bytes < expected_bytes:
                await asyncio.sleep(0)
        # The owner that was silent longest makes room, whatever key it has, and hears of it.
        parts = asyncio.Queue()
        parts.put_nowait(b'{"a":"')
        parts.put_nowait(b"x" * 1500)
        parts.put_nowait(b'"}')
        parts.put_nowait(b"")
        await call("whole", parts)
        assert statuses == {"whole": 200}
        assert budget.held_bytes == 1000
        for parts in stalled:
            parts.put_nowait(b"")
        stalled[0].put_nowait(b"x")
    assert budget.held_bytes == 0
    assert not budget.reading


async def test_a_body_has_room_as_long_as_no_other_is_whole(monkeypatch) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 100)
    body = {"a": "x" * 200}
    status, error, _ = await answered("healthz", body)
    assert status == 503
    assert error == "requests of 100 bytes are under way: send this one again"
    status, error, _ = await answered("healthz", body, packed=True)
    assert status == 503
