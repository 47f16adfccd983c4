"""What a replay that cannot go on says, and that it is not taken for one that differs."""

import os
import sys
from pathlib import Path

import pytest
from support.rigs.completed import completed
from support.rigs.run_processes import write_config


@pytest.mark.long
def test_a_step_that_fails_is_no_digest_that_differs(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = write_config(tmp_path, tiny_model)
    process = completed(
        [
            sys.executable,
            "-m",
            "slipstream.learner.trainer.replay",
            "--config",
            str(path),
        ],
        env={name: value for name, value in os.environ.items() if name != "RANK"},
    )
    assert process.returncode == 3, process.stderr
    cause = "slipstream: ConfigError: the environment must set RANK, as torchrun does"
    assert process.stderr.splitlines()[-1] == cause
