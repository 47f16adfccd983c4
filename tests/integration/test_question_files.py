"""Files of questions, as the command line sees them."""

import json
from pathlib import Path

from support.rigs.run_processes import SLOW, empty_model, run_command, write_config

QUESTIONS = "slipstream.environments.questions:Questions"


def test_a_missing_column_is_one_line_before_anything_starts(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n")
    environment = {
        "name": "sums",
        "reference": QUESTIONS,
        "args": {"path": "train.jsonl", "judge": "exact"},
    }
    config = write_config(tmp_path, empty_model(tmp_path), environments=[environment])
    done = run_command("run", config, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "slipstream: environment sums: train.jsonl, row 1 has no column 'question'; "
        "its columns are 'prompt', 'answer'\n"
    )
    # All there may be is the word of a busy machine that a check takes long.
    assert SLOW.sub("", done.stdout) == ""
    assert not list((tmp_path / "run" / "logs").glob("controller*"))
