"""The settings of the reference and critic models, each checked like the policy's."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.models.model_fields import field_problems
from slipstream.core.models.model_rules import (
    fp8_problems,
    layout_problems,
    model_problems,
    vision_layout_problems,
)
from slipstream.core.models.model_sizes import (
    ModelSizes,
    read_model_sizes,
    read_model_table,
    read_table,
)
from slipstream.core.settings.config import Config
from slipstream.core.settings.role_sections import (
    ReferenceSection,
    RoleSection,
    in_place_of,
    renamed,
    teacher_setting,
)


def reference_is_policy(config: Config) -> bool:
    """Whether the reference model is the policy, as it is or without its adapters.

    Otherwise it is a model of its own.
    """
    section = config.reference or ReferenceSection()
    if not config.has_plain_reference:
        return False
    if section.policy:
        return True
    is_other = section.names_model
    # Replayed routers follow the policy's own forward pass.
    replays = config.algorithm.router_replay != "off"
    return config.lora.rank > 0 and not is_other and not replays


def role_settings(config: Config) -> dict[str, Config]:
    """Returns the settings of each model that ranks load besides the policy, by role name."""
    settings_by_role: dict[str, Config] = {}
    reference = config.reference or ReferenceSection()
    critic = config.critic
    is_loaded = reference.server is None and not reference_is_policy(config)
    if config.has_plain_reference and is_loaded:
        settings_by_role["reference"] = _in_place_of_policy(config, reference)
    for name, teacher in reference.teachers.items() if config.needs_reference else ():
        if teacher.path is not None:
            settings_by_role[teacher_setting(name)] = _in_place_of_policy(config, teacher)
    if critic is not None:
        algorithm = config.algorithm.model_copy(update={"learning_rate": critic.learning_rate})
        settings = _in_place_of_policy(config, critic)
        settings_by_role["critic"] = settings.model_copy(update={"algorithm": algorithm})
    return settings_by_role


@contextlib.contextmanager
def named(config: Config, name: str) -> Iterator[None]:
    """Re-raises the block's ConfigError with the setting names of role `name`."""
    try:
        yield
    except ConfigError as error:
        role = config.roles.get(name)
        problem = str(error) if role is None else renamed(str(error), name, role)
        raise ConfigError(f"the {name}: {problem}") from error


def of_policy(config: Config) -> Config:
    """Returns the settings without the folders of other models, which only training reads."""
    changes: dict[str, object] = {"checkpoint": config.checkpoint.model_copy(update={"load": None})}
    if config.reference is not None:
        changes["reference"] = config.reference.model_copy(update={"path": None, "teachers": {}})
    if config.critic is not None:
        changes["critic"] = config.critic.model_copy(update={"path": None})
    return config.model_copy(update=changes)


def role_problems(config: Config, policy: ModelSizes) -> Iterator[str]:
    """Yields one line for each rule that the settings or folders of reference and critic break."""
    for name, settings in role_settings(config).items():
        role = config.roles.get(name)
        # Without a table the role has the policy's folder and layout, which are already checked.
        if role is not None:
            for problem in _problems(settings, policy, config.model.path):
                yield renamed(problem, name, role)
    reference = config.reference
    # A vLLM server ends if a request asks for more likely tokens than the vocabulary has, and a
    # reference model on the ranks would count a token twice.
    if reference is not None and reference.top_k > policy.vocab > 0:
        yield (
            f"reference.top_k must be at most the model's {policy.vocab} tokens, "
            f"got {reference.top_k}"
        )
    if reference is None or reference.path is None or not reference.refresh_every_steps:
        return
    if read_model_sizes(reference.path) != policy:
        yield (
            "reference.refresh_every_steps must be 0: the policy's weights do not fit "
            f"reference.path {reference.path}, whose config.json says another model"
        )


def _problems(settings: Config, policy: ModelSizes, policy_folder: Path) -> Iterator[str]:
    folder = settings.model.path
    learner = settings.learner
    try:
        sizes = read_model_sizes(folder)
    except ConfigError as error:
        yield str(error)
        return
    yield from model_problems(sizes)
    yield from field_problems(read_model_table(folder))
    # How the policy's experts are split concerns no model without experts.
    layout = learner.parallel.model_copy(update={} if sizes.experts else {"etp": None})
    yield from layout_problems(sizes, layout, learner.transformer)
    yield from fp8_problems(sizes, learner)
    if sizes.has_vision:
        yield from vision_layout_problems(learner, sizes)
    if sizes.has_vision != policy.has_vision:
        yield (
            f"model.path must see images if and only if the policy does, got a "
            f"{sizes.architecture} beside a {policy.architecture}"
        )
    elif sizes.has_vision:
        images = _images(folder, sizes)
        of_policy = _images(policy_folder, policy)
        differing = [
            f"{name} {images.get(name)}, not {of_policy.get(name)}"
            for name in sorted({*images, *of_policy})
            if images.get(name) != of_policy.get(name)
        ]
        if differing:
            yield (
                "model.path must make the policy's tokens of images, by config.json and the "
                f"image processor's file, others in {folder}: {'; '.join(differing)}"
            )
    if sizes.vocab != policy.vocab:
        yield (
            f"model.path must have the policy's vocabulary of {policy.vocab} tokens, "
            f"got {sizes.vocab} in {folder}"
        )
    else:
        # Without either file nothing is compared: weights alone are enough for a role.
        paths = folder / "tokenizer.json", policy_folder / "tokenizer.json"
        if all(path.is_file() for path in paths) and paths[0].read_bytes() != paths[1].read_bytes():
            role_tokens = _tokens(paths[0])
            policy_tokens = _tokens(paths[1])
            for number in sorted(role_tokens.keys() & policy_tokens.keys()):
                if role_tokens[number] != policy_tokens[number]:
                    other = (
                        f"token {number} is {role_tokens[number]!r}, not {policy_tokens[number]!r}"
                    )
                    yield f"model.path must have the policy's tokens, but in {folder} {other}"
                    break
    longest = settings.sampling.max_episode_tokens
    if sizes.max_positions and longest > sizes.max_positions:
        yield (
            f"model.path must have room for sampling.max_episode_tokens = {longest}, "
            f"got {sizes.max_positions_field} {sizes.max_positions} in {folder}"
        )


def _tokens(path: Path) -> dict[int, str]:
    """Returns the tokens of a tokenizer.json by number, or {} if its model is of another form."""
    table = _read_table(path)
    model = table.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[int, str] = {}
    if isinstance(vocabulary, dict):
        tokens = {number: token for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        tokens = {number: token for number, (token, _) in enumerate(vocabulary)}
    added = table.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        tokens[token["id"]] = token["content"]
    return tokens


def _images(folder: Path, sizes: ModelSizes) -> dict[str, object]:
    """Returns, by name, the settings with which the folder's model turns images into tokens."""
    table = read_model_table(folder)
    tower = table.get("vision_config") or {}
    processors = _read_table(folder / "processor_config.json")
    # The image processor, from the file that transformers would read.
    processor = processors.get("image_processor", _read_table(folder / "preprocessor_config.json"))
    if not isinstance(processor, dict):
        raise ConfigError(
            f"{folder / 'processor_config.json'}: image_processor must be a table, "
            f"got {processor!r}"
        )
    return {
        **processor,
        "image token": sizes.image_token,
        "spatial_merge_size": tower.get("spatial_merge_size", 2),
        "vision_config.patch_size": tower.get("patch_size"),
        "vision_config.temporal_patch_size": tower.get("temporal_patch_size", 2),
    }


def _read_table(path: Path) -> dict[str, object]:
    return read_table(path) if path.is_file() else {}


def _in_place_of_policy(config: Config, section: RoleSection) -> Config:
    changed = config.model_copy(update={"learner": in_place_of(config.learner, section)})
    if section.path is None:
        return changed
    model = config.model.model_copy(update={"path": section.path})
    # The policy's starting weights do not fit another folder.
    checkpoint = config.checkpoint.model_copy(update={"load": None})
    return changed.model_copy(update={"model": model, "checkpoint": checkpoint})
