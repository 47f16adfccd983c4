"""The rules for the layouts of models beside the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slipstream.core.settings.parallel_rules import table_problems, world_problems
from slipstream.core.settings.role_sections import RoleSection, in_place_of, renamed
from slipstream.core.settings.sampling_section import SamplingSection
from slipstream.core.settings.sections import LearnerSection


def role_problems(
    roles: Mapping[str, RoleSection], learner: LearnerSection, sampling: SamplingSection
) -> Iterator[str]:
    """Yields what is impossible in the layouts of `roles`, which are completed by the learner's."""
    for name, role in roles.items():
        own = in_place_of(learner, role)
        for problem in (*world_problems(own), *table_problems(own)):
            yield renamed(problem, name, role)
        room = own.micro_batch_tokens * own.parallel.cp
        if sampling.max_episode_tokens > room:
            yield (
                f"an episode must fit one micro batch of the {name}: sampling.max_episode_tokens "
                f"must be at most learner.micro_batch_tokens * {name}.parallel.cp = {room}, "
                f"got {sampling.max_episode_tokens}"
            )
