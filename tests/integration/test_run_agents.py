"""Agents in a run with all parts: hosted, any program, served from here, and broken ones."""

import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from support.fakes import letter_agents
from support.rigs.adapter_runs import LORA
from support.rigs.run_processes import (
    check_ledger,
    command,
    connection,
    succeed,
    summary_of,
    trained_trajectories,
    until_step,
    write_config,
)
from support.rigs.smallest_run import SMALLEST

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(700),
    pytest.mark.usefixtures("nothing_survives"),
]

RUN_LIMIT_S = 500.0
SIZES = {
    "evaluations": [],
    "algorithm__group_size": 4,
    "algorithm__groups_per_step": 6,
    "sampling__max_episode_tokens": 64,
    "rollout_server__max_episodes": 64,
}
# A program that calls the model once, and whose score another program gives.
PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]})
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body.encode(), key)) as answer:
    reply = json.load(answer)["choices"][0]["message"]["content"]
open("reply.txt", "w").write(reply)
"""
SCORE = "import sys; print(open('reply.txt').read().split()[:1] == [sys.argv[1]] and 1 or 0)"


def agents_folder(folder: Path) -> Path:
    shutil.copy(letter_agents.__file__, folder / "user_agents.py")
    return folder


async def test_agents_of_every_kind_train_the_model_with_every_default(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A user's shell does not set it; `make test` does.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    asks = [sys.executable, "-c", PROGRAM, "{letters}"]
    score = [sys.executable, "-c", SCORE, "{first}"]
    tasks = [{"letters": "b a c", "first": "a"}, {"letters": "d f e", "first": "d"}]
    entries = [
        {"name": "smallest", "reference": "user_agents:Smallest", "timeout_s": 60.0},
        {"name": "plainly", "reference": "user_agents:Plainly", "timeout_s": 60.0},
        {
            "name": "program",
            "reference": "slipstream.environments.command:Command",
            "args": {"command": asks, "tasks": tasks, "score_command": score},
            "timeout_s": 60.0,
            "weight": 0.5,
        },
    ]
    config = write_config(
        agents_folder(tmp_path),
        tiny_model,
        base=SMALLEST,
        # Enough for the agents that are served from the first step on.
        run__steps=16,
        environments=entries,
        algorithm={"group_size": 4, "groups_per_step": 6, "learning_rate": 1e-4},
        sampling={"max_reply_tokens": 8, "max_episode_tokens": 64},
    )
    async with command(tmp_path, "run", "config.toml", cwd=tmp_path) as run:
        async with connection(config, run) as client:
            await until_step(client, 1, limit_s=RUN_LIMIT_S)
            served = letter_agents.Smallest(length=2)
            await client.serve(served, name="served", weight=4.0, timeout_s=60.0)
        assert await run.wait(RUN_LIMIT_S) == 0, run.out + run.err
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 16
    assert summary["ledger"]["failed"] == 0
    check_ledger(summary)
    found = trained_trajectories(tmp_path / "run")
    assert {t.environment for t in found} == {"smallest", "plainly", "program", "served"}
    # The second call of an episode continues the tokens of the first one.
    twice = [t for t in found if t.metrics.get("attempts") == 2.0]
    assert twice
    assert all(len(t.run_lengths) == 4 and len(t.branches) <= 1 for t in twice)


def likeliest(model: Path) -> bytes:
    """The likeliest four tokens after the letters a b c, by plain transformers."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b c"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = policy.generate(**asked, max_new_tokens=4, do_sample=False)[0]
    reply = tokenizer.decode(tokens[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return reply.strip().encode()


@pytest.mark.slow
def test_the_model_as_the_run_started_judges_on_the_servers_of_the_run(tmp_path, tiny_model):
    entry = {"name": "asks", "reference": "user_agents:AsksTheStart", "timeout_s": 60.0}
    learning = {"lora": LORA, "algorithm__learning_rate": 2e-2, "weights__verify_every": 2}
    write_config(
        agents_folder(tmp_path), tiny_model, run__steps=8, environments=[entry], **SIZES, **learning
    )
    succeed("run", "config.toml", cwd=tmp_path, limit_s=RUN_LIMIT_S)
    summary = summary_of(tmp_path / "run")
    check_ledger(summary)
    found = trained_trajectories(tmp_path / "run")
    # Many versions sampled the replies; beside all of them the judge said what version 0 says.
    assert len({span.version.step for t in found for span in t.version_spans}) > 3
    assert {t.metrics["said"] for t in found} == {float(zlib.crc32(likeliest(tiny_model)))}
    assert all(len(t.branches) <= 1 for t in found)
    judged = sum(int(t.metrics["judge_tokens"]) for t in found)
    assert summary["ledger"]["judged"] >= judged > 0
