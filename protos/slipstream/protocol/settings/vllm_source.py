"""The names and types of vLLM's arguments, from its source: an import would take ten seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from pydantic import JsonValue
from slipstream.protocol.errors import ConfigError
from slipstream.protocol.settings.config import Config
from slipstream.protocol.settings.engine_table import OWNED, SECTION
from slipstream.protocol.settings.near_names import did_you_mean, near_names

_MODULE, _CLASS = "vllm.engine.arg_utils", "AsyncEngineArgs"
# Setting -> module and name of vLLM's table of parsers.
_PARSERS = {
    "tool_parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
_PLAIN: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a string", (str,)),
    "list": ("a list", (list,)),
    "set": ("a list", (list,)),
    "tuple": ("a list", (list,)),
    "dict": ("a table", (dict,)),
}


@dataclass(frozen=True)
class Place:
    """A name or an expression, and the module in which it is written."""

    module: str
    text: str


@dataclass(frozen=True)
class Form:
    """One type or set of choices that a value may have."""

    words: str
    types: tuple[type, ...] = ()
    choices: tuple[JsonValue, ...] = ()
    # Class of the keys, for a table whose keys are settings.
    keys_of: Place | None = None

    def takes(self, value: JsonValue) -> bool:
        """Whether a value of a TOML file has this form."""
        if self.choices:
            return _plain(value) in map(_plain, self.choices)
        # A bool is an int in Python, but not in TOML.
        return isinstance(value, self.types) and (bool in self.types or type(value) is not bool)


Forms: TypeAlias = tuple[Form, ...]


def check_engine(config: Config) -> None:
    """Checks the engine's settings against the source of the installed vLLM, if there is one.

    Raises ConfigError with one line: the nearest known names, or the value and its type.
    """
    spec = importlib.util.find_spec("vllm")
    settings = config.rollout_server
    if spec is None or not spec.submodule_search_locations:
        return
    source = VllmSource(Path(spec.submodule_search_locations[0]))
    for problem in source.problems(settings.engine):
        raise ConfigError(problem)
    for setting, name in (
        ("tool_parser", settings.tool_parser),
        ("reasoning_parser", settings.reasoning_parser),
    ):
        known = source.parsers(setting) if name is not None else []
        if name is not None and known and name not in known:
            near = near_names(name, known)
            hint = did_you_mean(near) if near else f"there are {', '.join(sorted(known))}"
            raise ConfigError(
                f"rollout_server.{setting} must be a parser of vLLM, got {name!r}; {hint}"
            )
    if settings.chat_template is not None and not settings.chat_template.is_file():
        raise ConfigError(
            f"rollout_server.chat_template must be a file, got {settings.chat_template}"
        )


def unknown_name(name: str, known: Iterable[str], *, section: str = SECTION) -> str:
    """Returns the message about a name that vLLM does not have."""
    near = near_names(name, known)
    owned = OWNED if section == SECTION else {}
    hint = ""
    if near and near[0] in owned:
        hint = f"; {near[0]!r} cannot be passed through: {owned[near[0]]}"
    elif near:
        hint = f"; {did_you_mean(other for other in near if other not in owned)}"
    return f"unknown key {section}.{name}{hint}"


class VllmSource:
    """Settings that the files of the package vllm in `folder` define; no code of it is run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tree = cache(self._parse)

    def problems(self, table: Mapping[str, JsonValue]) -> Iterator[str]:
        """Yields one line for each unknown name and each wrong type in `rollout_server.engine`.

        Types that are other classes, or computed, are left for vLLM to check.
        """
        fields = self.arguments()
        for name, value in table.items():
            if name not in fields:
                yield unknown_name(name, fields)
                continue
            forms = self.forms(fields[name])
            if forms and not any(form.takes(value) for form in forms):
                words = ", ".join(dict.fromkeys(form.words for form in forms))
                yield f"{SECTION}.{name} must be {words}, got {value!r}"
            elif forms and isinstance(value, dict):
                yield from self._unknown_keys(value, forms, f"{SECTION}.{name}")

    def arguments(self) -> dict[str, Place]:
        """Returns each argument's name and annotation; ConfigError if there are none."""
        fields = self._fields(Place(_MODULE, _CLASS))
        if not fields:
            raise ConfigError(
                f"{SECTION} cannot be checked: vLLM in {self._folder} has no {_MODULE}.{_CLASS}; "
                "0.32.0 was tested"
            )
        return fields

    def parsers(self, setting: str) -> list[str]:
        """Returns the names of vLLM's parsers for a setting; none if only vLLM can tell."""
        module, name = _PARSERS[setting]
        node, _ = self._definition(Place(module, name)) or (None, "")
        keys = node.keys if isinstance(node, ast.Dict) else []
        return [str(key.value) for key in keys if isinstance(key, ast.Constant)]

    def forms(self, annotation: Place) -> Forms | None:
        """Returns the forms that a value may have; None if only vLLM can tell."""
        return self._forms(ast.parse(annotation.text, mode="eval").body, annotation.module)

    def _unknown_keys(
        self, table: dict[str, JsonValue], forms: Forms, section: str
    ) -> Iterator[str]:
        owners = [form.keys_of for form in forms if form.takes(table)]
        fields: dict[str, Place] = {}
        for owner in owners:
            found = self._fields(owner) if owner is not None else None
            if found is None:
                return
            fields |= found
        for name, value in table.items():
            if name not in fields:
                yield unknown_name(name, fields, section=section)
            elif isinstance(value, dict) and (inner := self.forms(fields[name])):
                yield from self._unknown_keys(value, inner, f"{section}.{name}")

    def _forms(self, node: ast.expr, module: str) -> Forms | None:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            left, right = self._forms(node.left, module), self._forms(node.right, module)
            return None if left is None or right is None else left + right
        if isinstance(node, ast.Constant):
            # TOML has no null.
            return () if node.value is None else self.forms(Place(module, str(node.value)))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id == "Literal":
                return _choices(node.slice)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if node.id in _PLAIN:
            words, types = _PLAIN[node.id]
            return (Form(words, types),)
        return self._named(Place(module, node.id))

    def _named(self, place: Place) -> Forms | None:
        found = self._definition(place)
        if found is None:
            return None
        node, module = found
        if isinstance(node, ast.ClassDef):
            table = Place(module, node.name)
            return (Form("a table", (dict,), keys_of=table),) if _is_settings(node) else None
        return self._forms(node, module)

    def _fields(self, place: Place) -> dict[str, Place] | None:
        """Returns the fields of a dataclass and its bases; None when a class is not found."""
        node, module = self._definition(place) or (None, "")
        if not isinstance(node, ast.ClassDef):
            return None
        fields: dict[str, Place] = {}
        for base in node.bases:
            inherited = self._fields(Place(module, ast.unparse(base)))
            if inherited is None:
                return None
            fields |= inherited
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                annotation = ast.unparse(line.annotation)
                if not annotation.startswith("ClassVar") and not _is_computed(line.value):
                    fields[line.target.id] = Place(module, annotation)
        return {name: place for name, place in fields.items() if not name.startswith("_")}

    def _definition(self, place: Place) -> tuple[ast.expr | ast.ClassDef, str] | None:
        """Returns a name's class, or the expression assigned to it, and the module."""
        for node in self._tree(place.module):
            if isinstance(node, ast.ClassDef) and node.name == place.text:
                return node, place.module
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(t, ast.Name) and t.id == place.text for t in targets):
                    return node.value, place.module
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == place.text:
                        return self._definition(Place(node.module, alias.name))
        return None

    def _parse(self, module: str) -> list[ast.stmt]:
        package, *parts = module.split(".")
        path = self._folder.joinpath(*parts)
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if package != "vllm" or not file.is_file():
            return []
        return ast.parse(file.read_text(encoding="utf-8")).body


def _choices(node: ast.expr) -> Forms | None:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    known = tuple(value for value in values if isinstance(value, str | int))
    if len(known) < len(items):
        return None
    return (Form(f"one of {', '.join(map(str, known))}", choices=known),)


def _plain(value: JsonValue) -> JsonValue:
    """Returns `value` in lower case with _ for -: vLLM treats most of its words so."""
    return value.lower().replace("-", "_") if isinstance(value, str) else value


def _is_settings(node: ast.ClassDef) -> bool:
    """Whether a class is one of vLLM's classes of settings, which refuse unknown keys."""
    return any(isinstance(each, ast.Name) and each.id == "config" for each in node.decorator_list)


def _is_computed(default: ast.expr | None) -> bool:
    """Whether a field is not an argument: field(init=False)."""
    keywords = default.keywords if isinstance(default, ast.Call) else []
    return any(
        each.arg == "init" and isinstance(each.value, ast.Constant) and each.value.value is False
        for each in keywords
    )
