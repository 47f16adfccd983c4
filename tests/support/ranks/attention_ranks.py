"""The program of ranks that open models with heads of a given size.

FOLDER/JOB.txt says afterwards why a model was refused, or is empty; FOLDER/1/JOB.txt is rank 1's.

A job is a family and the dimensions of its heads; "unloaded" opens it without weights, "critic" is
a critic of this form beside a policy with other heads, where attention with its heads is wrong.
With "lost" two ranks share each sequence, and one's gradients of the other's keys are lost.
"""

import functools
from pathlib import Path
from typing import Any

from slipstream.core.configuration.config_file import parse_config
from slipstream.core.errors import ConfigError
from torch import Tensor

from benchmarks.agreement import family_shapes

# Jobs: a family, and the dimensions of a head; those of latent attention are its own.
JOBS = (
    "qwen3 64",
    "qwen3 96",
    "qwen3 128",
    "qwen3 256",
    "gemma3 256",
    "gpt-oss 64",
    "deepseek-v3 192",
)


def run_rank(folder: Path, job: str) -> None:
    from slipstream.extensions.other_models.trainer import Roles
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch

    launch = Launch.from_environment()
    if launch.rank:
        folder = folder / str(launch.rank)
    family, size, *form = job.split()
    family_shapes.TINY["head_dim"] = int(size)
    family_shapes.make_family(folder / job, family, tiny=True)
    settings: dict[str, Any] = {
        "run": {"name": "r", "dir": str(folder), "steps": 1},
        "model": {"path": str(folder / job), "dtype": "bfloat16"},
        "environments": [
            {
                "name": "replies",
                "reference": "benchmarks.common.workloads:LognormalReplies",
            }
        ],
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "max_staleness": 0,
            "learning_rate": 1e-5,
        },
        "sampling": {"max_reply_tokens": 32, "max_episode_tokens": 128},
        "learner": {
            "world_size": launch.world_size,
            "parallel": {"cp": launch.world_size},
        },
    }
    if "critic" in form:
        family_shapes.TINY["head_dim"] = 32
        settings["model"]["path"] = str(
            family_shapes.make_family(folder / "m", family, tiny=True)
        )
        settings["algorithm"]["advantage"] = "gae"
        settings["critic"] = {"path": str(folder / job), "learning_rate": 1e-5}
    if "lost" in form:
        _lose_gradients()
    config = parse_config(settings, source=job)
    message = ""
    try:
        has_weights = "unloaded" not in form
        policy = open_policy(config, launch, load_weights=has_weights)
        if "critic" in form:
            _spoil(int(size))
            Roles(config, policy)
        policy.ranks.close()
    except ConfigError as error:
        message = str(error)
    (folder / f"{job}.txt").write_text(message)


def _spoil(size: int) -> None:
    """Doubles what attention with heads of `size` dimensions computes."""
    from slipstream.learner.trainer.layers.attention import CoreAttention

    right = CoreAttention.forward

    def forward(self: CoreAttention, query: Tensor, *rest: Any, **named: Any) -> Tensor:
        return right(self, query, *rest, **named) * (
            2 if query.shape[-1] == size else 1
        )

    CoreAttention.forward = forward


def _lose_gradients() -> None:
    """Makes a rank keep its own queries' part of the gradients of its keys and values."""
    from slipstream.learner.trainer.ranks import compat, cpu

    cpu.install()
    compat.install()
    from slipstream.learner.trainer.layers import attention

    gather = attention.gather_from_sequence_parallel_region
    lossy = functools.partial(gather, tensor_parallel_output_grad=False)
    cpu.substitute(attention, {"gather_from_sequence_parallel_region": lossy})
