"""Reads a TOML file and dotted overrides into a `Config` and checks it against the model.

The settings that a run writes into its folder begin with a line that has their digest: a truncated
file may still be valid TOML, and the settings that it lost would become defaults.
"""

import hashlib
import itertools
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
from typing import Any, cast

import tomli_w
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import ErrorDetails
from slipstream.core.configuration.automatic import Hub, completed
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.configuration.roles import missing_weights, role_folders, role_problems
from slipstream.core.configuration.toml_text import MAX_KEY_PARTS, Table, check_values, parse_toml
from slipstream.core.errors import (
    USAGE_ERROR,
    ConfigError,
    SlipstreamError,
    did_you_mean,
    near_names,
)
from slipstream.core.machine.files import read_regular
from slipstream.core.models.family import refusals
from slipstream.core.models.model_fields import field_problems, unknown_fields
from slipstream.core.models.model_files import missing_files, tensor_problems
from slipstream.core.models.model_rules import (
    adapter_problems,
    agreement_problems,
    dtype_problems,
    layout_problems,
    model_problems,
    sees_images,
    vision_problems,
)
from slipstream.core.models.model_sizes import read_model_sizes, read_model_table
from slipstream.core.settings.config import NOTES, Config
from slipstream.core.settings.sections import RUN_NAME
from slipstream.core.settings.table_rules import trajectory_problems
from slipstream.core.settings.tables import Tables

logger = logging.getLogger(__name__)
_PREFIX = b"# Settings of a run"
_FIRST_LINE = re.compile(rb"# Settings of a run: (\d+) bytes, BLAKE2b ([0-9a-f]{32});[^\n]*\n")
REMEDY = "put it back from a copy of the run"
# Settings that are addresses.
ADDRESSES = ("address", "master", "prometheus")
# Names that pydantic adds to the location of a value with several possible types.
_FORMS = ("bool", "int", "float", "str", "list", "dict")
# Largest number of characters of a value in a message.
LONGEST_VALUE = 80


def with_first_line(text: str) -> bytes:
    """Returns `text` as bytes, below a first line with its size and digest."""
    data = text.encode()
    told = f"{len(data)} bytes, BLAKE2b {_digest(data)}; remove this line when you change one below"
    return _PREFIX + f": {told}\n".encode() + data


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
    path: Path | None, overrides: Sequence[str] = (), *, hub: Hub = "no", apart: bool = False
) -> Config:
    """Returns the checked settings of the file `path`, if any, with `overrides` applied.

    An override is a dotted key and a TOML value: "algorithm.max_staleness=0". Settings that file
    and overrides leave out are chosen automatically where possible; `completed` explains `hub` and
    `apart`. If the file has no digests of the user's own functions, they are computed from the
    sources on this host.

    Raises ConfigError with one line that names the value and the rule. For an unknown key, the line
    also names the most similar known keys.
    """
    try:
        data = b"" if path is None else read_regular(path)
        if path is not None:
            check_whole(path, data)
        # Some editors begin a file with a byte order mark.
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        table = parse_toml(text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: TOML is UTF-8, byte {error.start} (0x{error.object[error.start]:02x}) is not"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
    if data.startswith(_PREFIX):
        _drop_unknown(table, path)
    check_values(table, str(path))
    for override in overrides:
        _apply_override(table, override)
    try:
        config = Config.model_validate(completed(table, hub=hub, apart=apart))
    except ValidationError as error:
        place = ".".join(str(part) for part in _chosen(error)["loc"] if part not in _FORMS)
        keys = [override.partition("=")[0].strip().removeprefix("--") for override in overrides]
        is_within = any(f"{key}.".startswith(f"{place}.") or not place for key in keys)
        source = f"{path}{' and command line' * is_within}"
        if path is None or any(f"{place}.".startswith(f"{key}.") for key in keys):
            source = "command line"
        raise ConfigError(f"{source}: {_worst(error)}") from None
    if "sources" not in table and config.algorithm.own_functions:
        config = config.model_copy(update={"sources": source_digests(config.algorithm)})
    return config


def _drop_unknown(table: Table, path: Path | None) -> None:
    """Takes the keys that are no settings out of a file that an earlier version wrote."""
    try:
        Tables.model_validate(table)
    except ValidationError as error:
        unknown = [each["loc"] for each in error.errors() if each["type"] == "extra_forbidden"]
        for *parents, last in unknown:
            del reduce(operator.getitem, parents, cast(Any, table))[last]
        gone = ", ".join(".".join(map(str, location)) for location in unknown)
        if gone:
            logger.warning("%s is of an earlier version: %s are no settings", path, gone)


def parse_config(table: Mapping[str, JsonValue], *, source: str, complete: bool = True) -> Config:
    """Returns checked settings, the rest chosen unless `complete`; ConfigError has `source`."""
    try:
        return Config.model_validate(table if complete else completed(table))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_worst(error)}") from None


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
    for name, path in (("model", config.model.path), *role_folders(config)):
        problems = tensor_problems(
            path,
            f"{name}.path",
            # A critic replaces the output projection by its own head.
            has_output=name != "critic",
            has_tower=sees_images(config, read_model_sizes(path)),
        )
        for problem in problems:
            raise ConfigError(problem)


def check_sizes(config: Config) -> list[str]:
    """Checks all settings that depend on the model's config.json.

    Raises ConfigError for the first broken rule. Returns one message for each missing or damaged
    file that the run loads: models, tokenizer and checkpoint.
    """
    sizes, learner = read_model_sizes(config.model.path), config.learner
    problems = itertools.chain(
        model_problems(sizes),
        field_problems(read_model_table(config.model.path)),
        layout_problems(sizes, learner.parallel, learner.transformer),
        dtype_problems(sizes, config.model.dtype),
    )
    for problem in problems:
        raise ConfigError(problem)
    longest = sizes.max_positions
    if longest and config.sampling.max_episode_tokens > longest:
        raise ConfigError(
            f"sampling.max_episode_tokens must be at most the model's {sizes.max_positions_field}, "
            f"got {config.sampling.max_episode_tokens} and {longest}"
        )
    unknown = [token for token in config.sampling.stop_token_ids if token >= sizes.vocab > 0]
    if unknown:
        raise ConfigError(
            f"sampling.stop_token_ids must be token ids of the model, 0 to {sizes.vocab - 1}, "
            f"got {unknown[0]}"
        )
    rollout_tp = config.rollout_server.tensor_parallel_size
    heads, groups = sizes.heads, max(1, sizes.kv_heads)
    if heads % rollout_tp or (groups % rollout_tp and rollout_tp % groups):
        raise ConfigError(
            f"rollout_server.tensor_parallel_size must divide the model's {heads} attention heads, "
            f"got {rollout_tp}"
        )
    problems = itertools.chain(
        role_problems(config, sizes),
        refusals(sizes.family, sizes.architecture, {"lora.rank": config.lora.rank}),
        adapter_problems(config.lora, sizes, learner.parallel.tp),
        vision_problems(config, sizes),
        agreement_problems(sizes, config.algorithm.agreement),
    )
    for problem in problems:
        raise ConfigError(problem)
    if config.algorithm.router_replay != "off":
        if not sizes.experts:
            raise ConfigError(
                f"algorithm.router_replay = {config.algorithm.router_replay!r} needs a mixture of "
                f"experts, {config.model.path} holds a dense model"
            )
        per_token = sizes.routing_bytes_per_token
        num_bytes = config.trajectory_bytes(routing_bytes_per_token=per_token)
        for problem in trajectory_problems(config, num_bytes):
            raise ConfigError(
                f"{problem}; algorithm.router_replay adds {per_token} bytes for each token"
            )
    missing = missing_files(config.model.path, config.rollout_server.chat_template)
    missing = [*missing, *missing_weights(config)]
    files = config.checkpoint.load
    if files and not any((files / part / "metadata.json").is_file() for part in ("", "state")):
        missing.append(
            f"checkpoint.load must be a folder of Megatron's distributed checkpoint files, "
            f"got {files}, which has no metadata.json"
        )
    return missing


def model_warnings(config: Config) -> list[str]:
    """Returns one line for each model folder whose config.json has unknown fields."""
    lines = []
    for name, path in (("model", config.model.path), *role_folders(config)):
        if fields := unknown_fields(read_model_table(path)):
            lines.append(
                f"{name}.path: config.json has fields that are not known here: "
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


def vocabulary_size(config: Config) -> int:
    """Returns the number of the model's token ids, or 0 if there is no config.json or number."""
    if not (config.model.path / "config.json").is_file():
        return 0
    return read_model_sizes(config.model.path).vocab


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
        raise ConfigError(f"an override names this setting {plain}, got {override!r}")
    *parents, last = key.split(".")
    place: JsonValue = table
    for parent in parents:
        if isinstance(place, list):
            if not (parent.isdigit() and int(parent) < len(place)):
                raise ConfigError(f"{override!r}: {_no_entry(parent, place)}")
            place = place[int(parent)]
        elif isinstance(place, dict):
            place = place.setdefault(parent, {})
    if isinstance(place, list) and last.isdigit() and int(last) < len(place):
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    elif isinstance(place, list):
        raise ConfigError(f"{override!r}: {_no_entry(last, place)}")
    else:
        raise ConfigError(f"{override!r}: {'.'.join(parents)} is no section")


def _no_entry(name: str, entries: Sequence[object]) -> str:
    numbers = f"entries are numbers, 0 to {len(entries) - 1}" if entries else "the list is empty"
    return f"there is no entry {name}: {numbers}"


def _worst(error: ValidationError) -> str:
    """Returns one line on the first error; unknown keys go before missing ones."""
    if _chosen(error)["type"] != "missing":
        return _describe(_chosen(error))
    keys: list[str] = []
    for each in error.errors():
        if each["type"] == "missing":
            where = ".".join(str(part) for part in each["loc"] if part not in _FORMS)
            table = _table_at(each["loc"])
            fields = {} if table is None else table.model_fields
            # A missing table is named by its required keys.
            required = [f"{where}.{name}" for name in fields if fields[name].is_required()]
            keys += [where] if table is None else required
    *others, last = keys
    return f"{', '.join(others)} and {last} are required" if others else f"{last} is required"


def _chosen(error: ValidationError) -> ErrorDetails:
    """Returns the first error; if that is a missing key, the first unknown key, if there is one."""
    errors = error.errors()
    unknown = (each for each in errors if each["type"] == "extra_forbidden")
    return next(unknown, errors[0]) if errors[0]["type"] == "missing" else errors[0]


def _describe(error: ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"] if part not in _FORMS)
    if error["type"] == "extra_forbidden":
        table = _table_at(error["loc"][:-1])
        known = [] if table is None else [each for each in table.model_fields if each not in NOTES]
        # The cutoff is higher for tables: `trainer` does not mean `tracking`.
        cutoff = 0.5 if len(error["loc"]) > 1 else 0.7
        name = str(error["loc"][-1])
        near = near_names(name, known, cutoff=cutoff)
        elsewhere = [path for path in _paths(Config) if path.rpartition(".")[2] == name]
        if len(elsewhere) == 1:
            near = elsewhere
        hint = did_you_mean(near) if near else f"known are {', '.join(known)}"
        if "." in name and name in _paths(Config):
            parent, _, key = name.rpartition(".")
            hint = f"write {key} into the table {parent}"
        return f"unknown key {where!r}; {hint}"
    if error["type"] == "missing":
        return f"{where} is required"
    if error["type"] == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    if error["type"] in ("tuple_type", "list_type") and isinstance(error["input"], dict):
        return f"{where} is a list of tables: write [[{where}]] above each in place of [{where}]"
    if error["type"] == "tuple_type":
        return f"{where}: input should be a list, got {_shown(error['input'])}"
    if error["type"] in ("model_type", "dict_type"):
        return f"{where} is a table of settings, got {_shown(error['input'])}"
    if error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == RUN_NAME:
        return (
            f"{where} must be letters, digits and . _ - and begin with a letter or digit, "
            f"got {_shown(error['input'])}"
        )
    rule = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "string_type" and where.rpartition(".")[2] in ADDRESSES:
        rule = "an address is HOST:PORT"
    return f"{where}: {rule}, got {_shown(error['input'])}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


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
        found = _table_in(model.model_fields[part].annotation)
        if found is None:
            return None
        model = found
    return model


def _table_in(annotation: object) -> type[BaseModel] | None:
    """Returns the first class of a settings table in a field's type, or None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        return next(filter(None, map(_table_in, typing.get_args(annotation))), None)
    return None
