"""Faults of a run whose loop is a client's own: `python -m support.rigs.loop_chaos CONFIG.toml`.

To the faults of `chaos`, with those of the HTTP process, come those of requests: sent twice, late,
behind later ones, cut before or after they have reached the run. Clients go on as the SDK does,
and must see no error. What they saw must be, to the bit, what the same clients see without faults:
one run without any is compared with the runs of all seeds, since a client's rounds depend on none.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from slipstream.client.agent_gateway import bounded_server
from slipstream.client.terminal import say
from slipstream.client.verify import examine
from slipstream.core.configuration.config_file import load_config
from slipstream.core.errors import RunFailed
from slipstream.core.machine.address import free_port
from slipstream.core.machine.process import become_reaper
from slipstream.core.run_folder import JOURNAL, journal_logs
from slipstream.core.settings.config import Config
from starlette.requests import Request
from starlette.responses import Response

from support.rigs import chaos
from support.rigs.loop_client import LoopClient, logprobs_of, metrics_of, replies

FAULTS = ("repeat", "delay", "reorder", "cut request", "cut reply")
# Probability that a fault is one of requests.
REQUESTS = 0.6
LATE_S = 0.5
PASSED_S = 2.0
FAULT_S = 60.0
# Seconds within which clients end their round after the last fault.
END_S = 600.0
PROMPT = [1, 5, 6, 7]
# Rank and data of each client.
CLIENTS = ((1, [9, 12, 10, 14]), (8, [14, 9, 13, 12, 10]))


class UnrulyProxy:
    """An ASGI application that gives requests on, except for the fault that is asked for."""

    def __init__(self, target: str) -> None:
        self.http = httpx.AsyncClient(base_url=target, timeout=120, trust_env=False)
        self._fault, self._hit = "", asyncio.Event()
        # Set when a later request has been answered.
        self._passed = asyncio.Event()

    async def inject(self, fault: str) -> bool:
        """Does `fault` to the next request; returns whether one came."""
        self._fault = fault
        self._hit.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAULT_S):
                await self._hit.wait()
        self._fault = ""
        return self._hit.is_set()

    async def __call__(
        self, scope: dict[str, Any], receive: Callable, send: Callable
    ) -> None:
        body = await Request(scope, receive).body()
        fault = ""
        # A heartbeat or telemetry says nothing of operations.
        if not scope["path"].endswith(("telemetry", "session_heartbeat")):
            fault = self._fault
            self._fault = ""
        if fault:
            self._hit.set()
        try:
            if fault == "cut request":
                raise httpx.ReadError("the request is cut")
            if fault == "delay":
                await asyncio.sleep(LATE_S)
            if fault == "reorder":
                self._passed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PASSED_S):
                        await self._passed.wait()
            answer = await self._forward(scope, body)
            if fault == "repeat":
                answer = await self._forward(scope, body)
            if fault == "cut reply":
                raise httpx.ReadError("the reply is cut")
        except httpx.TransportError:
            # A body that is shorter than its length breaks the connection.
            headers = [(b"content-length", b"1")]
            await send(
                {"type": "http.response.start", "status": 200, "headers": headers}
            )
            await send({"type": "http.response.body", "body": b""})
            return
        self._passed.set()
        kind = {"content-type": answer.headers["content-type"]}
        await Response(answer.content, answer.status_code, kind)(scope, receive, send)

    async def _forward(self, scope: dict[str, Any], body: bytes) -> httpx.Response:
        headers = [
            pair
            for pair in scope["headers"]
            if pair[0] not in (b"host", b"content-length")
        ]
        return await self.http.request(
            scope["method"], scope["path"], content=body, headers=headers
        )


class Looper:
    """A client whose rounds depend on nothing but what came before."""

    def __init__(self, port: int, model: str, number: int) -> None:
        self.client = LoopClient(port, base_model=model)
        self.rank, reply = CLIENTS[number]
        tokens = [*PROMPT, *reply]
        self._datum = tokens[:-1], tokens[1:], {"weights": [1.0] * (len(tokens) - 1)}
        self.rounds: list[object] = []
        self.is_over = self.has_ended = False

    async def run(self, rounds: int = sys.maxsize) -> None:
        """Runs so many rounds, or until `is_over`."""
        session = await self.client.begin(rank=self.rank)
        assert "model_id" in session, session
        for number in range(rounds):
            if self.is_over:
                break
            self.rounds.append(await self._round(number))
        await self.client.post(f"sessions/{self.client.session}/finish", {})
        await self.client.http.aclose()
        self.has_ended = True

    async def _round(self, number: int) -> object:
        client = self.client
        session = await client.publish()
        sampling = [asyncio.ensure_future(self._sampled(session)) for _ in range(3)]
        passes = [
            client.passed([self._datum], "cross_entropy") for _ in range(1 + number % 3)
        ]
        step = {"seq_id": next(client.numbers), "model_id": client.model}
        step |= {"adam_params": {"learning_rate": 1e-3 * (1 + number % 5)}}
        # Together, so that they arrive in any order.
        *futures, stepped = await asyncio.gather(
            *map(client.send, passes), client.post("optim_step", step)
        )
        found: list[object] = []
        for future in futures:
            result = await client.result(future)
            found.append((logprobs_of(result), metrics_of(result)))
        answer = await client.result(stepped)
        assert "error" not in answer, answer
        found.append(
            {
                name: value
                for name, value in answer["metrics"].items()
                if name[-2:] != "_s"
            }
        )
        if number % 4 == 1:
            saved = await client.done("save_weights", path=f"r{number}")
            assert "error" not in saved, saved
            assert "error" not in (await client.load(saved["path"]))
        return found, [await sampled for sampled in sampling]

    async def _sampled(self, session: str) -> int:
        while True:
            future = await self.client.ask(session, PROMPT)
            answer = await self.client.result(future)
            # The result is None: the controller has lost it, and the SDK samples anew.
            if answer is not None:
                assert isinstance(answer, bytes), answer
                again = await self.client.result(future)
                assert again in (None, answer), (again, answer)
                # The texts of samples, and so their lengths, are drawn anew in each run.
                return len(replies(answer))


class LoopChaos(chaos.Chaos):
    """Faults of `slipstream tinker`, and clients that end before it does."""

    program = "tinker"
    at_once = 0.7
    points = ("any", "any", "any", "evaluation_lease", "batch", "step")

    def __init__(
        self,
        config: Config,
        command: Sequence[str],
        settings: Sequence[str],
        rng: random.Random,
        proxy: UnrulyProxy,
        loopers: Sequence[Looper],
    ) -> None:
        super().__init__(config, command, settings, rng)
        self._proxy = proxy
        self._loopers = loopers

    def _beside(self) -> list[Any]:
        return [looper.run() for looper in self._loopers]

    async def _end(self) -> None:
        for looper in self._loopers:
            looper.is_over = True
        async with asyncio.timeout(END_S):
            while not all(looper.has_ended for looper in self._loopers):
                await asyncio.sleep(0.05)
            while (command := self._live) is None:
                await asyncio.sleep(0.05)
        self._is_over = True
        command.send_signal(signal.SIGINT)

    async def _fault(self, roles: Sequence[str], proxy: chaos.Proxy | None) -> str:
        if self._random.random() >= REQUESTS:
            return await super()._fault(roles, proxy)
        kind = self._random.choice(FAULTS)
        return kind if await self._proxy.inject(kind) else ""


@contextlib.asynccontextmanager
async def proxied(port: int):
    """A proxy before the HTTP process of `port`, and its own port."""
    proxy = UnrulyProxy(f"http://127.0.0.1:{port}")
    own = free_port("127.0.0.1")
    server = uvicorn.Server(bounded_server(proxy, port=own))
    # The proxy tells of each connection that is cut.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    serving = asyncio.ensure_future(server.serve())
    try:
        yield proxy, own
    finally:
        server.should_exit = True
        await serving
        await proxy.http.aclose()


async def calm_rounds(
    config: Config, command: Sequence[str], settings: Sequence[str], asked
):
    """What clients see of a run without faults, each in so many rounds as `asked` says."""
    port = free_port("127.0.0.1")
    harmless = chaos.Chaos(config, command, [], random.Random(0))
    process = await harmless.start(
        "tinker", *settings, "run.name=calm", "--port", str(port)
    )
    loopers = [
        Looper(port, str(config.model.path), number) for number in range(len(asked))
    ]
    try:
        runs = map(Looper.run, loopers, asked)
        ended = asyncio.ensure_future(process.wait())
        running = asyncio.gather(*runs)
        await asyncio.wait((ended, running), return_when=asyncio.FIRST_COMPLETED)
        assert process.returncode is None, harmless.last_line()
        await running
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()
    return [looper.rounds for looper in loopers]


async def run_loop_chaos(
    path: Path,
    overrides: Sequence[str],
    *,
    kills: int,
    seeds: Sequence[int],
    every_s: float,
    command: Sequence[str] = chaos.CLI,
) -> int:
    """Runs clients under `kills` faults of each seed, compares and checks; prints a line for each.

    Returns 0 if no run differs from that without faults.
    """
    loop = ("controller.client_loop=true", "learner.shared_prefix_tokens=0")
    become_reaper()
    harmed = []
    for seed in seeds:
        own = [*overrides, f"run.name=harmed-{seed}"]
        config = load_config(path, [*loop, *own])
        settings = [str(path), *own]
        harmed.append(
            await harmed_rounds(config, command, settings, kills, seed, every_s)
        )
    longest = [
        max(map(len, rounds_of_place))
        for rounds_of_place in zip(*(rounds for _, rounds in harmed), strict=True)
    ]
    calm = await calm_rounds(config, command, [str(path), *overrides], longest)
    is_bad = False
    for answer, rounds in harmed:
        answer["different"] = [
            (client, number)
            for client, (ours, theirs) in enumerate(zip(rounds, calm, strict=True))
            for number, looper in enumerate(ours)
            if looper != theirs[number]
        ][:10]
        say(json.dumps(answer))
        is_bad |= bool(answer["exit_code"] or answer["different"] or answer["found"])
        is_bad |= not answer["replay_equal"] or answer["fired"] < kills
    return int(is_bad)


async def harmed_rounds(
    config: Config,
    command: Sequence[str],
    settings: Sequence[str],
    kills: int,
    seed: int,
    every_s: float,
) -> tuple[dict[str, Any], list[list[object]]]:
    """What is told of a run under faults, and what its clients saw."""
    port = free_port("127.0.0.1")
    async with proxied(port) as (proxy, own):
        number = len(config.lora.adapters) or 1
        loopers = [
            Looper(own, str(config.model.path), number) for number in range(number)
        ]
        harmed = LoopChaos(
            config,
            command,
            [*settings, "--port", str(port)],
            random.Random(seed),
            proxy,
            loopers,
        )
        code = await harmed.run(kills, every_s, chaos.ROLES, partitions=False)
    if not journal_logs(config.run_dir / JOURNAL):
        raise RunFailed(f"the run did not begin: {harmed.last_line()}")
    findings = await asyncio.to_thread(examine, config.run_dir)
    replay = await harmed.start("replay", str(config.run_dir))
    is_equal = await replay.wait() == 0
    rounds = [looper.rounds for looper in loopers]
    fired = harmed.tally.fired
    return {
        "fired": fired.total(),
        "by_fault": dict(sorted(fired.items())),
        "rounds": [len(rounds_of_looper) for rounds_of_looper in rounds],
        "replay_equal": is_equal,
        "found": findings.faults[:10],
        "exit_code": code,
        "commands": harmed.tally.commands,
        "seed": seed,
    }, rounds


def main(command: Sequence[str] = chaos.CLI) -> int:
    """Does to the run of the arguments what they say; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--kills", type=int, default=20, help="the number of faults")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the faults"
    )
    parser.add_argument(
        "--every-s", type=float, default=1.0, help="mean pause behind a step"
    )
    return asyncio.run(run_loop_chaos(**vars(parser.parse_args()), command=command))


if __name__ == "__main__":
    sys.exit(main())
