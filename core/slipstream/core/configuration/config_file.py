"""Reads a TOML file and dotted overrides into a `Config` and checks it against the model.

The settings that a run writes into its folder begin with a line that has their digest: a truncated
file may still be valid TOML, and the settings that it lost would become defaults.
"""

import hashlib
import itertools
import json
import logging
import operator
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import BaseModel, JsonValue, ValidationError
from slipstream.core.configuration.automatic import Hub, completed
from slipstream.core.configuration.foreign_names import explain, is_former, settings_for
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.configuration.node_plan import NodeGpus
from slipstream.core.configuration.roles import role_problems
from slipstream.core.configuration.toml_text import (
    MAX_KEY_PARTS,
    Table,
    check_values,
    parse_toml,
    word_hint,
)
from slipstream.core.errors import (
    USAGE_ERROR,
    ConfigError,
    SlipstreamError,
    did_you_mean,
    near_names,
)
from slipstream.core.group_sizes import group_sizes_of
from slipstream.core.machine.files import read_regular
from slipstream.core.models import model_files, model_rules
from slipstream.core.models.families import refusals
from slipstream.core.models.model_fields import field_problems, unknown_fields
from slipstream.core.models.model_sizes import (
    ModelSizes,
    read_model_sizes,
    read_model_table,
    read_table,
)
from slipstream.core.settings.config import NOTES, Config
from slipstream.core.settings.sections import RUN_NAME
from slipstream.core.settings.table_rules import trajectory_problems
from slipstream.core.settings.tables import Tables

AnySection = TypeVar("AnySection", bound=BaseModel)

logger = logging.getLogger(__name__)
_PREFIX = b"# Settings of a run"
_FIRST_LINE = re.compile(rb"# Settings of a run: (\d+) bytes, BLAKE2b ([0-9a-f]{32});[^\n]*\n")
REMEDY = "put it back from a copy of the run"
# Settings that are addresses.
ADDRESSES = ("address", "master", "prometheus")
# Names that pydantic adds to the location of a value with several possible types.
_FORMS = ("bool", "int", "float", "str", "list", "dict")
# Least similarity of a key to a known one that counts as a slip of the fingers.
NEAR = 0.72
# Largest number of characters of a value in a message.
LONGEST_VALUE = 80


def with_first_line(text: str) -> bytes:
    """Returns `text` as bytes, below a first line with its size and digest."""
    data = text.encode()
    facts = (
        f"{len(data)} bytes, BLAKE2b {_digest(data)}; remove this line when you change one below"
    )
    return _PREFIX + f": {facts}\n".encode() + data


def check_whole(path: Path, data: bytes) -> None:
    """Raises ConfigError if the settings in `data` do not match the digest in their first line.

    Files without such a line are written by users, and pass unless they are empty.
    """
    if not data.strip():
        raise ConfigError(f"{path} is empty: {REMEDY}, or write settings into it")
    if not data.startswith(_PREFIX):
        return
    first = _FIRST_LINE.match(data)
    if first is None or first[2].decode() != _digest(data[first.end() :]):
        raise ConfigError(
            f"{path} is not what the run wrote, by the digest in its first line: {REMEDY}, or "
            "remove that line if the change was meant"
        )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    hub: Hub = "no",
    apart: bool = False,
    gpus: NodeGpus | None = None,
) -> Config:
    """Returns the checked settings of the file `path`, if any, with `overrides` applied.

    An override is a dotted key and a TOML value: "algorithm.max_staleness=0". Settings that file
    and overrides leave out are chosen automatically where possible; `completed` explains `hub`,
    `apart` and `gpus`. If the file has no digests of the user's own functions, of the tokenizer and
    of a chat template, they are computed from the files on this host.

    Raises ConfigError with one line that names the value and the rule. For an unknown key, the line
    also names the most similar known keys.
    """
    table = {} if path is None else _read_settings(path)
    check_values(table, str(path))
    for override in overrides:
        _apply_override(table, override)
    try:
        config = Config.model_validate(completed(table, hub=hub, apart=apart, gpus=gpus))
    except ValidationError as error:
        place, line = _explained(error)
        keys = [override.partition("=")[0].strip().removeprefix("--") for override in overrides]
        is_within = any(f"{key}.".startswith(f"{place}.") or not place for key in keys)
        source = f"{path}{' and command line' * is_within}"
        if path is None or any(f"{place}.".startswith(f"{key}.") for key in keys):
            source = "command line"
        raise ConfigError(f"{source}: {line}") from None
    if "sources" not in table:
        config = config.model_copy(update={"sources": _sources(config)})
    return config


def _read_settings(path: Path) -> dict[str, Any]:
    """Returns the table in a file; raises ConfigError where it cannot be read or is no TOML."""
    try:
        data = read_regular(path)
        check_whole(path, data)
        # Some editors begin a file with a byte order mark.
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        table = parse_toml(text)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: TOML is UTF-8, byte {error.start} (0x{error.object[error.start]:02x}) is not"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}{word_hint(text, error)}") from error
    if data.startswith(_PREFIX):
        _drop_unknown(table, path)
    return table


def _sources(config: Config) -> dict[str, str]:
    """Returns the digests of the user's functions, the tokenizer, a chat template and weights."""
    template = config.rollout_server.chat_template
    digests = {"model.path's tokenizer": model_files.tokenizer_digest(config.model.path)}
    if template is not None:
        digests[f"the chat template {template}"] = model_files.files_digest([template])
    for setting, folder in {"model.path": config.model.path, **config.weight_folders}.items():
        digests[f"{setting}'s weights"] = model_files.weights_digest(folder)
    known_digests = {name: digest for name, digest in digests.items() if digest}
    return source_digests(config.own_functions) | known_digests


def _drop_unknown(table: Table, path: Path | None) -> None:
    """Takes the keys that are no settings out of a file that another release wrote."""
    try:
        Tables.model_validate(table)
    except ValidationError as error:
        unknown = [fault["loc"] for fault in error.errors() if fault["type"] == "extra_forbidden"]
        for *parents, last in unknown:
            del reduce(operator.getitem, parents, cast(Any, table))[last]
        gone = ", ".join(".".join(map(str, location)) for location in unknown)
        if gone:
            logger.warning("%s is of another release: %s are no settings here", path, gone)


def parse_config(table: Mapping[str, JsonValue], *, source: str, complete: bool = True) -> Config:
    """Returns checked settings, the rest chosen unless `complete`; ConfigError has `source`."""
    try:
        return Config.model_validate(table if complete else completed(table))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explained(error)[1]}") from None


def parse_section(section: type[AnySection], table: Mapping[str, object]) -> AnySection:
    """Returns the checked settings of `table`; raises ConfigError for the first fault."""
    try:
        return section.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_explained(error)[1]) from None


def run_check(check: Callable[[Config], None]) -> int:
    """Checks the settings on stdin; returns 0, or 2 with the fault as stderr's last line."""
    config = parse_config(tomllib.loads(sys.stdin.read()), source="the resolved settings")
    try:
        check(config)
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def dump_config(config: Config) -> str:
    """Returns all settings, defaults included, as TOML that `load_config` reads."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def check_model(config: Config) -> None:
    """Checks a model's folder and what depends on it; raises ConfigError; loads nothing."""
    missing = check_sizes(config)
    if missing:
        raise ConfigError(missing[0])
    for setting, path in {"model.path": config.model.path, **config.role_folders}.items():
        problems = model_files.tensor_problems(
            path,
            setting,
            # A critic replaces the output projection by its own head.
            has_output=setting != "critic.path",
            has_tower=read_model_sizes(path).has_vision,
        )
        for problem in problems:
            raise ConfigError(problem)


def check_sizes(config: Config) -> list[str]:
    """Checks all settings that depend on the model's config.json.

    Raises ConfigError for the first broken rule. Returns one message for each missing or damaged
    file that the run loads: models, tokenizer and checkpoint.
    """
    sizes = read_model_sizes(config.model.path)
    learner = config.learner
    # The type that some families lack.
    half = "float16" if config.model.dtype == "float16" else None
    problems = itertools.chain(
        model_rules.model_problems(sizes),
        field_problems(read_model_table(config.model.path)),
        model_rules.layout_problems(sizes, learner.parallel, learner.transformer),
        refusals(sizes.family, sizes.architecture, {"model.dtype": half}),
    )
    for problem in problems:
        raise ConfigError(problem)
    longest = sizes.max_positions
    if longest and config.sampling.max_episode_tokens > longest:
        raise ConfigError(
            f"sampling.max_episode_tokens must be at most the model's {sizes.max_positions_field}, "
            f"got {config.sampling.max_episode_tokens} and {longest}"
        )
    _check_token_ids(config, sizes)
    rollout_tp = config.rollout_server.tensor_parallel_size
    heads = sizes.heads
    groups = max(1, sizes.kv_heads)
    if heads % rollout_tp or (groups % rollout_tp and rollout_tp % groups):
        raise ConfigError(
            f"rollout_server.tensor_parallel_size must divide the model's {heads} attention heads, "
            f"got {rollout_tp}"
        )
    problems = itertools.chain(
        model_rules.stage_problems(
            sizes,
            config.rollout_server.pipeline_parallel_size,
            has_tower=bool(read_model_table(config.model.path).get("vision_config")),
        ),
        role_problems(config, sizes),
        refusals(sizes.family, sizes.architecture, {"lora.publish": config.lora.publish}),
        model_rules.adapter_problems(config.lora, sizes, learner.parallel.tp),
        model_rules.vision_problems(config, sizes),
        model_rules.agreement_problems(sizes, config.algorithm.agreement),
        model_rules.fp8_problems(sizes, learner),
    )
    for problem in problems:
        raise ConfigError(problem)
    if config.algorithm.router_replay != "off":
        _check_routing(config, sizes)
    missing = model_files.missing_files(config.model.path, config.rollout_server.chat_template)
    for setting, folder in config.role_folders.items():
        missing += model_files.missing_weights(folder, setting)
    files = config.checkpoint.load
    if files and not any((files / part / "metadata.json").is_file() for part in ("", "state")):
        missing.append(
            f"checkpoint.load must be a folder of Megatron's distributed checkpoint files, "
            f"got {files}, which has no metadata.json"
        )
    return missing


def _check_token_ids(config: Config, sizes: ModelSizes) -> None:
    """Raises ConfigError for a stop token that the model does not have, by settings or files."""
    unknown = [token for token in config.sampling.stop_token_ids if token >= sizes.vocab > 0]
    if unknown:
        raise ConfigError(
            f"sampling.stop_token_ids must be token ids of the model, 0 to {sizes.vocab - 1}, "
            f"got {unknown[0]}"
        )
    if (path := config.model.path / "generation_config.json").is_file():
        ends = read_table(path).get("eos_token_id")
        for end in ends if isinstance(ends, list) else [ends]:
            if type(end) not in (int, type(None)):
                # The engine would end with such a request.
                raise ConfigError(f"{path}: eos_token_id must be token ids, got {end!r}")


def _check_routing(config: Config, sizes: ModelSizes) -> None:
    """Raises ConfigError for a model without routing, or trajectories too large to hold it."""
    if not sizes.experts:
        raise ConfigError(
            f"algorithm.router_replay = {config.algorithm.router_replay!r} needs a mixture of "
            f"experts, {config.model.path} holds a dense model"
        )
    per_token = sizes.routing_bytes_per_token
    num_bytes = config.trajectory_bytes(routing_bytes_per_token=per_token)
    largest = group_sizes_of(config).largest
    for problem in trajectory_problems(config, num_bytes, group_size=largest):
        raise ConfigError(
            f"{problem}; algorithm.router_replay adds {per_token} bytes for each token"
        )


def model_warnings(config: Config) -> list[str]:
    """Returns one line for each model folder whose config.json has unknown fields."""
    lines = []
    for setting, path in {"model.path": config.model.path, **config.role_folders}.items():
        if fields := unknown_fields(read_model_table(path)):
            lines.append(
                f"{setting}: config.json has fields that are not known here: "
                f"{', '.join(fields)}; if one of them changes what the model computes, learner and "
                "rollout servers may differ"
            )
    return lines


def largest_trajectory_bytes(config: Config) -> int:
    """Returns the most bytes of a queued trajectory; raises ConfigError without config.json."""
    if config.algorithm.router_replay == "off":
        return config.trajectory_bytes()
    per_token = read_model_sizes(config.model.path).routing_bytes_per_token
    return config.trajectory_bytes(routing_bytes_per_token=per_token)


def vocabulary_size(folder: Path) -> int:
    """Returns the number of a model's token ids, or 0 if there is no config.json or number."""
    return read_model_sizes(folder).vocab if (folder / "config.json").is_file() else 0


def _apply_override(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    if key.count(".") >= MAX_KEY_PARTS:
        raise ConfigError(f"an override's key has at most {MAX_KEY_PARTS} parts: {key[:40]!r}...")
    try:
        values = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        values = {"value": text}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the override {override[:40]!r}... has no value: {error}") from error
    if len(values) > 1:
        raise ConfigError(f"an override has one value, got {override!r}")
    value = values["value"]
    check_values(value, f"the override {override[:40]!r}")
    key = key.strip().removeprefix("--")
    plain = re.sub(r"\[(\d+)\]", r".\1", key).lstrip("+~")
    if plain != key:
        marks = "without + or ~" if key[0] in "+~" else "with .0 in place of [0]"
        raise ConfigError(f"an override is written {marks}, {plain}={text}: got {override!r}")
    parts = key.split(".")
    place = cast(Any, table)
    for number, part in enumerate(parts, start=1):
        entry: str | int = part
        if isinstance(place, list):
            if not (part.isdigit() and int(part) < len(place)):
                entries = f"entries are numbers, 0 to {len(place) - 1}"
                if len(place) == 1:
                    entries = "there is one entry, 0"
                elif not place:
                    entries = "the list is empty"
                raise ConfigError(f"{override!r}: there is no entry {part}: {entries}")
            entry = int(part)
        elif not isinstance(place, dict):
            raise ConfigError(f"{override!r}: {'.'.join(parts[:-1])} is no section")
        if number == len(parts):
            place[entry] = value
        else:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place[entry]


def _explained(error: ValidationError) -> tuple[str, str]:
    """Returns the setting of the first error, and one line on it.

    An unknown key goes before missing ones, of which it may be the reason; one line names these.
    """
    errors = error.errors()
    unknown = (fault for fault in errors if fault["type"] == "extra_forbidden")
    worst = next(unknown, errors[0]) if errors[0]["type"] == "missing" else errors[0]
    where = _place(worst["loc"])
    value = worst["input"]
    shown = repr(value)
    shown = shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}..."
    rule = worst["msg"][0].lower() + worst["msg"][1:]
    match worst["type"]:
        case "missing":
            keys: list[str] = []
            for fault in errors:
                if fault["type"] == "missing":
                    place = _place(fault["loc"])
                    table = _table_at(fault["loc"])
                    # A missing table is named by its required keys.
                    fields = {} if table is None else table.model_fields
                    required = [f"{place}.{name}" for name in fields if fields[name].is_required()]
                    keys += [place] if table is None else required
            *first_keys, last = keys
            are = f"{', '.join(first_keys)} and {last} are" if first_keys else f"{last} is"
            return where, f"{are} required"
        case "extra_forbidden":
            return where, f"unknown key {where!r}; {_hint(worst['loc'], worst['input'])}"
        case "value_error":
            message = worst["msg"].removeprefix("Value error, ")
            return where, f"{where}: {message}" if where else message
        case "tuple_type" | "list_type" if isinstance(value, dict):
            rule = f"is a list of tables: write [[{where}]] above each in place of [{where}]"
            return where, f"{where} {rule}"
        case "tuple_type":
            return where, f"{where} is a list{_as_list(worst['loc'], value)}, got {shown}"
        case "model_type" | "dict_type":
            return where, f"{where} is a table of settings, got {shown}"
        case "string_pattern_mismatch" if worst["ctx"]["pattern"] == RUN_NAME:
            rule = "must be letters, digits and . _ - and begin with a letter or digit"
            return where, f"{where} {rule}, got {shown}"
        case "string_type" if where.rpartition(".")[2] in ADDRESSES:
            rule = "an address is HOST:PORT"
    return where, f"{where}: {rule}, got {shown}"


def _as_list(location: tuple[int | str, ...], value: object) -> str:
    """Returns how the list that `value` means is written, or "" if that would be no better."""
    elements: list[int | str] = []
    for text in str(value).split(","):
        # torch's name of a GPU.
        number = text.strip().removeprefix("cuda:")
        elements.append(int(number) if number.isdecimal() else text.strip())
    *parents, name = (part for part in location if part not in _FORMS)
    table = _table_at(tuple(parents))
    if table is None or name not in table.model_fields or not isinstance(value, str | int):
        return ""
    try:
        table.model_validate({name: elements})
    except ValidationError as error:
        if any(problem["loc"][:1] == (name,) for problem in error.errors()):
            return ""
    written = json.dumps(elements, ensure_ascii=False)
    return f": '{_place(location)}={written}' on a command line"


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part not in _FORMS)


def _hint(location: tuple[int | str, ...], value: object) -> str:
    """Returns what an unknown key with `value` may mean, or the keys known in its place."""
    table = _table_at(location[:-1])
    name = str(location[-1])
    fields = [] if table is None else [field for field in table.model_fields if field not in NOTES]
    paths = list(_paths(Config))
    if "." in name and name in paths:
        parent, _, key = name.rpartition(".")
        return f"write {key} into the table {parent}"
    typed = _first_leaf(_place(location), value)
    same_key = {path for path in paths if path.rpartition(".")[2] == name}
    near = [field for field in fields if field.startswith(f"{name}_")]
    near = near or near_names(name, fields, cutoff=NEAR)
    explanation = "" if near and isinstance(value, Mapping) else explain(typed)
    # A key of ours, in another table, is a slip: no other trainer needs to be named.
    is_slip = bool(same_key) and settings_for(typed) <= same_key and not is_former(typed)
    if explanation and not is_slip:
        return explanation
    # The name may be a key of another table, or its first letters: `lr` means `learning_rate`.
    keys = [(path, path.rpartition(".")[2]) for path in paths]
    elsewhere = [p for p, key in keys if name in (key, re.sub("([^_])[^_]*_?", r"\1", key))]
    near = elsewhere if 0 < len(elsewhere) <= 3 else near
    return did_you_mean(near) if near else f"known are {', '.join(fields)}"


def _first_leaf(place: str, value: object) -> str:
    """Returns the dotted name of the first setting in `value`, which stands at `place`."""
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
        place = f"{place}.{name}"
    return place


def _paths(table: type[BaseModel], place: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings below `table`, except those in lists of tables."""
    for name, field in table.model_fields.items():
        inner = _table_in(field.annotation)
        if inner is None:
            yield f"{place}{name}"
        elif typing.get_origin(field.annotation) is not tuple:
            yield from _paths(inner, f"{place}{name}.")


def _table_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Returns the class of the settings table at `location`, or None if it is no table."""
    model: type[BaseModel] = Config
    for part in location:
        if isinstance(part, int):
            continue
        table = _table_in(model.model_fields[part].annotation)
        if table is None:
            return None
        model = table
    return model


def _table_in(annotation: object) -> type[BaseModel] | None:
    """Returns the first class of a settings table in a field's type, or None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        return next(filter(None, map(_table_in, typing.get_args(annotation))), None)
    return None
