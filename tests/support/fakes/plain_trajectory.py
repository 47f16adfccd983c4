"""A trajectory of which a test says only what it is about."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)


def plain_trajectory(
    token_ids: npt.ArrayLike,
    run_lengths: Sequence[int],
    logprobs: npt.ArrayLike | None = None,
    **fields: Any,
) -> Trajectory:
    """A completed episode of training; without `logprobs` each sampled token has -1.

    Without `version_spans` among `fields` all tokens are of version 0.
    """
    sampled = sum(run_lengths[1::2])
    usual = {
        "run_id": "run",
        "group_id": GroupId("group"),
        "member": 0,
        "attempt": 0,
        "server_id": ServerId("server"),
        "server_epoch": 1,
        "environment": "environment",
        "task_index": 0,
        "seed": 0,
        "purpose": Purpose.TRAINING,
        "status": Status.COMPLETED,
        "version_spans": (VersionSpan(sampled, PolicyVersion(0, 0)),),
        "failure": None,
        "will_retry": False,
        "reward": 0.0,
        "metrics": {},
        "num_turns": 0,
        "generation_s": 0.0,
        "environment_s": 0.0,
        "prompt_text": "",
        "reply_text": "",
        "routed_experts": None,
        "branches": (),
        "is_given": False,
        "reference": None,
        "images": (),
        "image_places": (),
        "adapter": "",
        "max_reply_tokens": 0,
        "expected_answer": "",
        "prompt_logprobs": b"",
        "kept_tokens": b"",
        "judged_lease": 0,
        "teacher_prompt": b"",
    }
    return Trajectory(
        token_ids=np.asarray(token_ids, dtype=np.uint32),
        run_lengths=tuple(run_lengths),
        behavior_logprobs=np.asarray(
            np.full(sampled, -1.0) if logprobs is None else logprobs, dtype=np.float32
        ),
        **(usual | fields),
    )
