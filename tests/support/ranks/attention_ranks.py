"""The program of ranks that open models with heads of a given size.

FOLDER/JOB.txt says afterwards why a model was refused, or is empty.
"""

from __future__ import annotations

from pathlib import Path

import family_shapes
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config_file import parse_config

# Jobs: a family, and the dimensions of a head; those of latent attention are its own.
JOBS = (
    "qwen3 64",
    "qwen3 96",
    "qwen3 128",
    "qwen3 256",
    "gemma2 256",
    "gemma3 256",
    "gpt-oss 64",
    "deepseek-v3 192",
)


def run_rank(folder: Path, job: str) -> None:
    """Opens the model of a job on one rank."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    family, size = job.split()
    family_shapes.TINY["head_dim"] = int(size)
    family_shapes.make_family(folder / job, family, tiny=True)
    settings = {
        "run": {"name": "r", "dir": str(folder), "steps": 1},
        "model": {"path": str(folder / job), "dtype": "bfloat16"},
        "environments": [{"name": "replies", "reference": "workloads:LognormalReplies"}],
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "max_staleness": 0,
            "learning_rate": 1e-5,
        },
        "sampling": {"max_reply_tokens": 32, "max_episode_tokens": 128},
        "learner": {"world_size": 1},
    }
    said = ""
    try:
        open_policy(parse_config(settings, source=job), Launch.from_environment()).ranks.close()
    except ConfigError as error:
        said = str(error)
    (folder / f"{job}.txt").write_text(said)
