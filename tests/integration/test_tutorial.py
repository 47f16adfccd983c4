"""Every command and file of docs/tutorial.md, in its order, as a reader would go through it."""

import json
from itertools import product
from pathlib import Path

import pytest
from support.fakes.page_reader import Reader
from support.rigs.run_processes import LONG_RUN

pytestmark = LONG_RUN

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def read_through(folder: Path, model: Path, steps: int) -> Reader:
    (folder / "models").mkdir()
    (folder / "models" / "tiny").symlink_to(model)
    reader = Reader(PAGE, folder, steps, meanwhile=("slipstream status",))
    reader.go()
    return reader


def test_every_command_of_the_tutorial_works(tmp_path: Path, tiny_model: Path) -> None:
    # The steps are so many that the run has not ended when the second terminal has asked.
    reader = read_through(tmp_path, tiny_model, 30)
    assert (
        "28"
        in reader.outputs[next(c for c in reader.outputs if "slipstream check" in c)]
    )
    assert "reward held out" in reader.outputs["slipstream run reverse.toml"]
    assert "reverse" in reader.outputs["slipstream status"]
    assert reader.outputs["python replies.py"].count("<reply> ->") >= 4
    (chat,) = (text for command, text in reader.outputs.items() if "chat.py" in command)
    assert len(chat.splitlines()) == 2


@pytest.mark.slow
def test_the_model_of_the_tutorial_learns(tmp_path: Path, tiny_model: Path) -> None:
    reader = read_through(tmp_path, tiny_model, 150)
    summary = json.loads((tmp_path / "runs" / "reverse" / "summary.json").read_text())
    assert summary["reward_last"] > 0.85
    assert summary["reward_heldout"] > 0.7
    # Which pair it reverses wrongly, if any, depends on what was sampled when.
    pairs = ["".join(pair) for pair in product("abcdef", repeat=2)]
    replies = reader.say(
        "python chat.py runs/reverse/checkpoints/final", map(" ".join, pairs)
    )
    lines = ["".join(line.split()) for line in replies.splitlines()]
    right = sum(
        a == b
        for pair, reply in zip(pairs, lines, strict=True)
        for a, b in zip(pair[::-1], reply, strict=False)
    )
    assert right / (2 * len(pairs)) > 0.7
