"""A whole run whose loop is a client's own, over HTTP, with a real engine and trainer."""

import asyncio
import contextlib
import signal
import sys

import httpx
import pytest
from slipstream.client.launch.preflight import free_port
from support.rigs.loop_client import LoopClient, logprobs_of, metrics_of, replies
from support.rigs.run_processes import check_ledger, summary_of
from support.rigs.smallest_run import own_settings
from support.rigs.waiting import LIMIT_S

PROMPT, TAUGHT = [1, 5, 6, 7], [9, 12, 10, 14, 11, 13]
GREEDY = {"sampling_params": {"max_tokens": 6, "temperature": 0.0}}
SETTINGS = ("sampling.max_reply_tokens=8", "sampling.max_episode_tokens=64", "run.name=own")


@contextlib.asynccontextmanager
async def tinker(folder, model):
    """The client of a run that `slipstream tinker` has started; the run has ended well after it."""
    port = free_port("127.0.0.1")
    config = folder / "own.toml"
    config.write_text('[run]\nsteps = 1000\n[model]\ndtype = "float32"\n')
    command = ("-m", "slipstream.client.cli", "tinker", config, "--port", port)
    given = [str(one) for one in (*command, *own_settings(folder, model), *SETTINGS)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *given,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said = asyncio.ensure_future(process.stdout.read())
    client = LoopClient(port, base_model=str(model))
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                assert process.returncode is None, (await said).decode()
                with contextlib.suppress(httpx.TransportError):
                    await client.http.get("healthz")
                    break
                await asyncio.sleep(0.1)
            yield client
    finally:
        await client.http.aclose()
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        code = await process.wait()
    assert code == 128 + signal.SIGINT, (await said).decode()


def taught(weight: float = 1.0) -> tuple[list[int], list[int], dict[str, list[float]]]:
    """The reply to the prompt, whose own tokens have no weight."""
    tokens = [*PROMPT, *TAUGHT]
    weights = [0.0] * (len(PROMPT) - 1) + [weight] * len(TAUGHT)
    return tokens[:-1], tokens[1:], {"weights": weights}


@pytest.mark.long
async def test_a_client_teaches_the_model_a_reply_and_samples_it(tmp_path, tiny_model) -> None:
    async with tinker(tmp_path, tiny_model) as client:
        assert "model_id" in await client.begin()
        session = await client.publish()
        future = await client.ask(session, PROMPT, num_samples=4)
        found = replies(await client.result(future))
        # The trainer gives what the engine has sampled the same log-probabilities.
        data = []
        for tokens, _, _ in found:
            whole = [*PROMPT, *tokens]
            data.append((whole[:-1], whole[1:], {"weights": [0.0] * (len(whole) - 1)}))
        forward = client.passed(data, "cross_entropy", forward_only=True)
        ours = logprobs_of(await client.result(await client.send(forward)))
        for (_, sampled, _), mine in zip(found, ours, strict=True):
            assert mine[len(PROMPT) - 1 :] == pytest.approx(sampled, abs=1e-4)
        losses = []
        for _ in range(30):
            passed = await client.send(client.passed([taught()], "cross_entropy"))
            assert (await client.step(learning_rate=0.01))["metrics"]["learning_rate"] == 0.01
            losses.append(metrics_of(await client.result(passed))["loss:sum"])
        assert losses[-1] < 0.2 * losses[0]
        session = await client.publish()
        future = await client.ask(session, PROMPT, **GREEDY)
        ((tokens, _, _),) = replies(await client.result(future))
        assert tokens == TAUGHT
        # A saved state is that of before, to the bit, with the moments of Adam.
        saved = await client.result(await client.order("save_weights", path="x"))
        again = []
        for _ in range(2):
            passed = await client.send(client.passed([taught()], "cross_entropy"))
            await client.step(learning_rate=0.01)
            passed = await client.send(client.passed([taught(0.5)], "cross_entropy"))
            await client.step(learning_rate=0.01)
            again.append(logprobs_of(await client.result(passed)))
            await client.begin_from(saved["path"])
        assert again[0] == again[1]
    summary = summary_of(tmp_path / "own")
    check_ledger(summary)
    assert (summary["state"], summary["steps"]) == ("stopped", 36)
