"""A whole run whose loop is a client's own, over HTTP, with a real engine and trainer."""

import pytest
from support.rigs.loop_client import logprobs_of, metrics_of, replies
from support.rigs.run_processes import checked
from support.rigs.tinker_runs import PROMPT, newest_reply, taught, tinker

TAUGHT = [9, 12, 10, 14, 11, 13]


@pytest.mark.long
async def test_a_client_teaches_the_model_a_reply_and_samples_it(
    tmp_path, tiny_model
) -> None:
    async with tinker(tmp_path, tiny_model) as (client, _):
        assert "model_id" in await client.begin()
        session = await client.publish()
        future = await client.ask(session, PROMPT, num_samples=4)
        sampled_replies = replies(await client.result(future))
        # The trainer gives what the engine has sampled the same log-probabilities.
        data = []
        for tokens, _, _ in sampled_replies:
            conversation = [*PROMPT, *tokens]
            data.append(
                (
                    conversation[:-1],
                    conversation[1:],
                    {"weights": [0.0] * (len(conversation) - 1)},
                )
            )
        forward = client.passed(data, "cross_entropy", forward_only=True)
        ours = logprobs_of(await client.result(await client.send(forward)))
        for (_, sampled, _), our_logprobs in zip(sampled_replies, ours, strict=True):
            assert our_logprobs[len(PROMPT) - 1 :] == pytest.approx(sampled, abs=1e-4)
        losses = []
        for _ in range(30):
            passed = await client.send(client.passed([taught(TAUGHT)], "cross_entropy"))
            assert (await client.step(learning_rate=0.01))["metrics"][
                "learning_rate"
            ] == 0.01
            losses.append(metrics_of(await client.result(passed))["loss:sum"])
        assert losses[-1] < 0.2 * losses[0]
        assert await newest_reply(client) == TAUGHT
        # A saved state is that of before, to the bit, with the moments of Adam.
        saved = await client.result(await client.order("save_weights", path="x"))
        again = []
        for _ in range(2):
            passed = await client.send(client.passed([taught(TAUGHT)], "cross_entropy"))
            await client.step(learning_rate=0.01)
            passed = await client.send(
                client.passed([taught(TAUGHT, 0.5)], "cross_entropy")
            )
            await client.step(learning_rate=0.01)
            again.append(logprobs_of(await client.result(passed)))
            await client.begin_from(saved["path"])
        assert again[0] == again[1]
    summary = checked(tmp_path / "own")
    assert (summary["state"], summary["steps"]) == ("stopped", 36)
