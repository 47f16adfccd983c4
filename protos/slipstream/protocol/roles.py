"""The models beside the policy, each as if it were the policy of a run of its own."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.protocol.config import Config
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.model_sizes import ModelSizes, read_model_sizes
from slipstream.protocol.parallel_rules import layout_problems, model_problems
from slipstream.protocol.role_sections import ReferenceSection, RoleSection, in_place_of, renamed


def reference_config(config: Config) -> Config | None:
    """The settings by which the reference model is loaded; None without one."""
    if config.algorithm.kl.coefficient == 0:
        return None
    section = config.reference or ReferenceSection()
    changed = _in_place_of_policy(config, section)
    if section.dtype is None:
        return changed
    model = changed.model.model_copy(update={"dtype": section.dtype})
    return changed.model_copy(update={"model": model})


def critic_config(config: Config) -> Config | None:
    """The settings by which the critic is loaded and trained; None without one."""
    section = config.critic
    if section is None:
        return None
    algorithm = config.algorithm.model_copy(update={"learning_rate": section.learning_rate})
    return _in_place_of_policy(config, section).model_copy(update={"algorithm": algorithm})


def role_problems(config: Config, policy: ModelSizes) -> Iterator[str]:
    """What the folders of reference and critic decide: one line for each rule that is broken."""
    for name, settings in (
        ("reference", reference_config(config)),
        ("critic", critic_config(config)),
    ):
        role = config.roles.get(name)
        # Without a table it is the policy's folder in the policy's layout.
        if settings is not None and role is not None:
            for problem in _problems(settings, policy):
                yield renamed(problem, name, role)
    reference = config.reference
    if reference is None or reference.path is None or not reference.refresh_every_steps:
        return
    if read_model_sizes(reference.path) != policy:
        yield (
            "reference.refresh_every_steps must be 0: the policy's weights do not fit "
            f"reference.path {reference.path}, a model of other sizes"
        )


def _problems(settings: Config, policy: ModelSizes) -> Iterator[str]:
    folder, learner = settings.model.path, settings.learner
    try:
        sizes = read_model_sizes(folder)
    except ConfigError as error:
        yield str(error)
        return
    yield from model_problems(sizes)
    yield from layout_problems(sizes, learner.parallel, learner.transformer)
    if not any(folder.glob("*.safetensors")):
        yield f"model.path must hold safetensors weights, but {folder} has none"
    if sizes.vocab != policy.vocab:
        yield (
            f"model.path must have the policy's vocabulary of {policy.vocab} tokens, "
            f"got {sizes.vocab} in {folder}"
        )
    longest = settings.sampling.max_episode_tokens
    if sizes.max_positions and longest > sizes.max_positions:
        yield (
            f"model.path must have room for sampling.max_episode_tokens = {longest}, "
            f"got max_position_embeddings {sizes.max_positions} in {folder}"
        )


def _in_place_of_policy(config: Config, section: RoleSection) -> Config:
    path = section.path or config.model.path
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": path}),
            "learner": in_place_of(config.learner, section),
        }
    )
