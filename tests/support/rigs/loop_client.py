"""A client of the Tinker API: the requests of SDK 0.38, in its order and with its numbers."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Self

import httpx
import numpy as np
from slipstream.extensions.tinker import wire_pb2 as wire

from support.rigs.waiting import LIMIT_S

PROTOBUF = "application/x-protobuf"
ADAM = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
}


class LoopClient:
    def __init__(self, port: int, *, base_model: str = "nowhere") -> None:
        address = f"http://127.0.0.1:{port}/api/v1/"
        self.http = httpx.AsyncClient(
            base_url=address,
            headers={"x-api-key": "tml-any"},
            # The client keeps each connection, as the SDK does.
            limits=httpx.Limits(),
            timeout=120,
            trust_env=False,
        )
        self._base_model = base_model
        self._others: list[LoopClient] = []
        self.session = self.model = ""
        self.numbers, self.models = itertools.count(1), itertools.count()
        self.sampling, self.samples = itertools.count(), itertools.count()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (*self._others, self):
            await client.http.aclose()

    def another(self) -> "LoopClient":
        """One more client of the same HTTP process, which is closed with this one."""
        self._others.append(
            LoopClient(self.http.base_url.port, base_model=self._base_model)
        )
        return self._others[-1]

    async def ready(self, is_there: Callable[[], bool] = lambda: True) -> None:
        """Waits until the HTTP process answers; AssertionError if it is there no more."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                assert is_there()
                with contextlib.suppress(httpx.TransportError):
                    await self.http.get("healthz")
                    return
                await asyncio.sleep(0.05)

    async def post(self, path: str, body: dict[str, Any] | bytes) -> Any:  # noqa: ANN401
        """The answer to a request: JSON, or an `httpx.Response` that is none of success."""
        answer = await self._answer(path, body)
        return answer.json() if answer.status_code == 200 else answer

    async def result(self, future: dict[str, Any]) -> Any:  # noqa: ANN401
        """The result of a future: JSON, the bytes of a protobuf, None of a sample that is lost."""
        request = {"request_id": future["request_id"], "allow_metadata_only": True}
        while True:
            answer = await self._answer("retrieve_future", request)
            if answer.status_code == 410 and request["request_id"].endswith(":sample"):
                return None
            assert answer.status_code == 200, answer.text
            if answer.headers["content-type"] == PROTOBUF:
                return answer.content
            if (found := answer.json()).get("type") != "try_again":
                return found

    async def _answer(self, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
        is_json = isinstance(body, dict)
        content = json.dumps(body).encode() if is_json else body
        kind = {"content-type": "application/json" if is_json else PROTOBUF}
        while True:
            # The SDK sends again what a connection or the server has lost, too.
            with contextlib.suppress(httpx.TransportError):
                answer = await self.http.post(path, content=content, headers=kind)
                if answer.status_code < 500:
                    return answer
            await asyncio.sleep(0.05)

    async def begin(self, rank: int = 4, **request: Any) -> dict[str, Any]:  # noqa: ANN401
        if not self.session:
            answer = await self.post("create_session", {"sdk_version": "0.38.0"})
            self.session = answer["session_id"]
        request |= {
            "session_id": self.session,
            "model_seq_id": next(self.models),
            "base_model": self._base_model,
            "lora_config": {"rank": rank},
        }
        return await self._began(
            await self.result(await self.post("create_model", request))
        )

    async def begin_from(self, path: str) -> dict[str, Any]:
        request = {
            "session_id": self.session,
            "model_seq_id": next(self.models),
            "path": path,
            "optimizer": True,
        }
        return await self._began(
            await self.result(await self.post("load_weights", request))
        )

    async def _began(self, made: dict[str, Any]) -> dict[str, Any]:
        if "model_id" in made:
            self.model, self.numbers = made["model_id"], itertools.count(1)
        return made

    def passed(
        self,
        data: Sequence[tuple[list[int], list[int], dict[str, list[float]]]],
        loss: str,
        *,
        number: int | None = None,
        forward_only: bool = False,
    ) -> bytes:
        """A pass over (tokens, targets, inputs of the loss by name)."""
        request = wire.ForwardBackwardRequest(
            model_id=self.model,
            seq_id=next(self.numbers) if number is None else number,
            loss_fn=loss,
            forward_only=forward_only,
        )
        for tokens, targets, inputs in data:
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(
                tokens, "<i4"
            ).tobytes()
            arrays = {"target_tokens": np.array(targets, "<i8")}
            arrays |= {name: np.array(values, "<f4") for name, values in inputs.items()}
            for name, array in arrays.items():
                datum.loss_fn_inputs[name].dense = array.tobytes()
                is_float = array.dtype == np.float32
                datum.loss_fn_inputs[name].dtype = (
                    wire.FLOAT32 if is_float else wire.INT64
                )
                datum.loss_fn_inputs[name].shape.append(len(array))
        return request.SerializeToString()

    async def send(self, body: bytes) -> dict[str, Any]:
        return await self.post("forward_backward", body)

    async def order(self, path: str, /, **body: Any) -> dict[str, Any]:  # noqa: ANN401
        """Sends an operation of the model in its order; returns its future."""
        settings = {"model_id": self.model, "seq_id": next(self.numbers)}
        return await self.post(path, settings | body)

    async def done(self, path: str, /, **body: Any) -> Any:  # noqa: ANN401
        """The result of an operation of the model in its order."""
        return await self.result(await self.order(path, **body))

    async def load(self, path: str, *, optimizer: bool = True) -> Any:  # noqa: ANN401
        return await self.done("load_weights", path=path, optimizer=optimizer)

    async def step(self, **numbers: float) -> dict[str, Any]:
        return await self.done("optim_step", adam_params=ADAM | numbers)

    async def publish(self, **request: str) -> str:
        """Publishes; returns the id of the sampling session."""
        request |= {"sampling_session_seq_id": next(self.sampling)}
        return (await self.done("save_weights_for_sampler", **request))[
            "sampling_session_id"
        ]

    async def ask(self, session: str, prompt: list[int], **asked: Any) -> Any:  # noqa: ANN401
        """Sends a sample; returns its future, or the refusal."""
        body = {
            "sampling_session_id": session,
            "seq_id": next(self.samples),
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 4, "temperature": 1.0},
        }
        return await self.post("asample", body | asked)

    async def sample(self, session: str, prompt: list[int], **asked: Any) -> Any:  # noqa: ANN401
        """The result of a sample."""
        return await self.result(await self.ask(session, prompt, **asked))

    def go_on(self, before: "LoopClient") -> None:
        """Continues the session and the model of a client that died."""
        self.session = before.session
        self.model = before.model
        self.numbers = before.numbers
        self.sampling = before.sampling
        self.samples = before.samples


def replies(result: bytes) -> list[tuple[list[int], list[float], int]]:
    """Tokens, log-probabilities and stop reason of each reply of a sample."""
    sequences = wire.SampleResponse.FromString(result).sequences
    return [
        (
            np.frombuffer(sequence.tokens, "<i4").tolist(),
            np.frombuffer(sequence.logprobs, "<f4").tolist(),
            sequence.stop_reason,
        )
        for sequence in sequences
    ]


def logprobs_of(result: bytes) -> list[list[float]]:
    """The log-probabilities of each datum of a pass."""
    (record,) = wire.ForwardBackwardOutput.FromString(result).loss_fn_outputs
    logprobs = record.fields["logprobs"]
    values = np.frombuffer(logprobs.data, "<f4")
    ends = np.frombuffer(logprobs.offsets, "<i8") // 4
    return [values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def metrics_of(result: bytes) -> dict[str, float]:
    """The metrics of a pass."""
    return dict(wire.ForwardBackwardOutput.FromString(result).metrics)
