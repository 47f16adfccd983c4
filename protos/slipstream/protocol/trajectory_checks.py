"""What must hold between the parts of a trajectory that came over the wire."""

from __future__ import annotations

import itertools
import math

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.reference_logprobs import check_reference
from slipstream.core.types import SAMPLED_ARRAYS, Trajectory


def _check_branches(trajectory: Trajectory) -> None:
    name, runs = trajectory.trajectory_id, [branch.num_runs for branch in trajectory.branches]
    for number in runs:
        if number == 0 or number % 2:
            raise ProtocolError(f"{name}: a branch must have an even number of runs, got {number}")
    if runs and sum(runs) != len(trajectory.run_lengths):
        raise ProtocolError(
            f"{name}: branches of {sum(runs)} runs, but {len(trajectory.run_lengths)} runs"
        )
    for branch in trajectory.branches:
        if not math.isfinite(branch.share):
            raise ProtocolError(f"{name}: share {branch.share} is not a finite number")
        if branch.reward is not None and not math.isfinite(branch.reward):
            raise ProtocolError(f"{name}: reward {branch.reward} is not a finite number")
    rewards = {branch.name: branch.reward for branch in trajectory.branches}
    if any(branch.reward != rewards[branch.name] for branch in trajectory.branches):
        raise ProtocolError(f"{name}: branches of one name must have one reward")


def _check_images(trajectory: Trajectory) -> None:
    name, offsets = trajectory.trajectory_id, [place.offset for place in trajectory.image_places]
    if any(place.image >= len(trajectory.images) for place in trajectory.image_places):
        raise ProtocolError(f"{name}: a place names an image beyond its {len(trajectory.images)}")
    if any(
        now >= after for now, after in itertools.pairwise([*offsets, len(trajectory.token_ids)])
    ):
        raise ProtocolError(f"{name}: the places of images are not in the order of its tokens")


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises ProtocolError when the parts of a trajectory do not fit together."""
    name, sampled = trajectory.trajectory_id, trajectory.num_sampled_tokens
    if sum(trajectory.run_lengths) != len(trajectory.token_ids):
        raise ProtocolError(
            f"{name}: runs of {sum(trajectory.run_lengths)} tokens, "
            f"but {len(trajectory.token_ids)} tokens"
        )
    arrays = {field: getattr(trajectory, field) for field in SAMPLED_ARRAYS}
    for field, array in arrays.items():
        if array is not None and len(array) != sampled:
            raise ProtocolError(
                f"{name}: {len(array)} values of {field} for {sampled} sampled tokens"
            )
    if any(span.length == 0 for span in trajectory.version_spans):
        raise ProtocolError(f"{name}: a version span is empty")
    if sum(span.length for span in trajectory.version_spans) != sampled:
        raise ProtocolError(f"{name}: the version spans do not cover its {sampled} sampled tokens")
    if not math.isfinite(trajectory.reward):
        raise ProtocolError(f"{name}: reward {trajectory.reward} is not a finite number")
    for field, array in arrays.items():
        if array is not None and not np.logical_and.reduce(np.isfinite(array)):
            raise ProtocolError(f"{name}: a value of {field} is not a finite number")
    _check_branches(trajectory)
    reference = trajectory.reference
    if reference is not None and (fault := check_reference(reference, trajectory.unpredicted())):
        raise ProtocolError(f"{name}: {fault}")
    _check_images(trajectory)
