"""An environment with tools in a run with all parts, and its replay."""

import json
import shutil
from pathlib import Path

import pytest
from support.fakes import example_tools
from support.fakes.chat_models import make_chat_model
from support.rigs import run_processes

pytestmark = [pytest.mark.timeout(700), pytest.mark.usefixtures("nothing_survives")]

LOOKING = {"reference": "user_tools:Looking", "timeout_s": 60.0}


@pytest.mark.slow
def test_calls_of_tools_train_the_model_and_are_replayed(tmp_path: Path) -> None:
    shutil.copy(example_tools.__file__, tmp_path / "user_tools.py")
    model = make_chat_model(
        tmp_path / "model", max_length=1024, words=example_tools.CALLS
    )
    run_processes.write_config(
        tmp_path,
        model,
        run__steps=6,
        environments=[
            # The environment's prompts say that the model should not think.
            {
                "name": "silent",
                "chat_template_kwargs": {"enable_thinking": False},
                **LOOKING,
            }
        ],
        evaluations=[{"name": "held", "num_episodes": 4, **LOOKING}],
        algorithm__group_size=4,
        algorithm__groups_per_step=6,
        sampling__max_turns=4,
        sampling__max_reply_tokens=8,
        sampling__max_episode_tokens=512,
        rollout_server__max_episodes=64,
        rollout_server__tool_parser="hermes",
        controller__sample_every_steps=1,
    )
    run_processes.succeed("run", "config.toml", cwd=tmp_path)
    folder = tmp_path / "run"
    summary = run_processes.checked(folder)
    assert summary["steps"] == 6
    assert summary["ledger"]["failed"] == 0
    trajectories = run_processes.trained_trajectories(folder)
    assert {t.environment for t in trajectories} == {"silent"}
    assert all(t.prompt_text.endswith("</think>\n\n") for t in trajectories)
    called = [t for t in trajectories if t.metrics.get("calls")]
    # A call is answered behind its own tokens, in one conversation.
    assert any(t.num_turns > 1 for t in called)
    assert [(t.environment, t.branches) for t in trajectories if t.branches] == []
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    turns = next(row["turns"] for row in parsed if "turns" in row)
    assert '"name": "look"' in turns[0]["context"]
    assert "<tool_call>" in turns[0]["sampled"]
    assert "<|im_start|>tool\nseen " in turns[1]["context"]
    run_processes.check_replay(folder, cwd=tmp_path)
