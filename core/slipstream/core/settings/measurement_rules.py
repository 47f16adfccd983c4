"""Rules for lengths, evaluations and the profile: one line for each broken rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.core.settings.measurement_sections import EvaluationSection, ProfileSection
from slipstream.core.settings.sampling_section import SamplingSection
from slipstream.core.settings.sections import LearnerSection, RunSection


def length_problems(
    sampling: SamplingSection, evaluations: Sequence[EvaluationSection]
) -> Iterator[str]:
    """Checks that prompts and replies fit into an episode."""
    if sampling.total_tokens < sampling.max_episode_tokens:
        yield (
            f"sampling.max_total_tokens must be 0 or at least max_episode_tokens, "
            f"got {sampling.max_total_tokens} and {sampling.max_episode_tokens}"
        )
    if (sampling.max_prompt_tokens or 0) >= sampling.max_episode_tokens:
        yield (
            f"sampling.max_prompt_tokens must be below max_episode_tokens, "
            f"got {sampling.max_prompt_tokens} and {sampling.max_episode_tokens}"
        )
    for evaluation in evaluations:
        if (evaluation.max_reply_tokens or 1) >= sampling.max_episode_tokens:
            yield (
                f"sampling.max_episode_tokens must leave room for a prompt beside "
                f"max_reply_tokens of evaluation {evaluation.name}, "
                f"got {sampling.max_episode_tokens} and {evaluation.max_reply_tokens}"
            )


def profile_problems(
    profile: ProfileSection, learner: LearnerSection, run: RunSection
) -> Iterator[str]:
    """Checks that the profile lies within the run and its ranks."""
    if profile.start_step is not None and profile.start_step > run.steps:
        yield (
            f"debug.profile.start_step must be at most run.steps, "
            f"got {profile.start_step} and {run.steps}"
        )
    if max(profile.ranks, default=0) >= learner.world_size:
        yield (
            f"debug.profile.ranks must be below learner.world_size, "
            f"got {max(profile.ranks)} and {learner.world_size}"
        )
