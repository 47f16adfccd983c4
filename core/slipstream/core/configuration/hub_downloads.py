"""Files of a run from the hub: models that its settings give by name, commits of its data sets."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.hub import COMMIT, DATA_PREFIX, HubFiles
from slipstream.core.settings.role_sections import teacher_setting

MODELS = ("model", "reference", "critic")
QUESTIONS = "slipstream.environments.questions:Questions"
# OWNER/NAME, optionally with a commit, tag or branch.
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = "*.safetensors"
# Files with other forms of the same weights, and the files that belong to them.
_WITHOUT = ("consolidated*", "original/*", "*/*.safetensors", "params.json")


def bring_files(
    table: dict[str, Any],
    before: Mapping[str, Any],
    *,
    whole: bool,
    apart: bool,
) -> None:
    """Downloads models that `table` gives by hub name, and pins the commits of its data sets.

    A model's name is replaced by its local folder; a data set's commit is added to its
    environment's `args`. `before` holds the settings in the run's folder, or nothing: a name
    without a revision keeps the commit recorded there. If `whole` is false, weights are not
    downloaded, and commits of data sets are not pinned. `apart` says that the parts of the run are
    started separately; then a model's name must include a commit. Raises ConfigError if this commit
    is missing or a download fails.
    """
    for place in (*MODELS, *_teacher_places(table)):
        section = _value_at(table, place)
        earlier = _value_at(before, place)
        path = _value_at(section, "path")
        if isinstance(section, dict) and isinstance(path, str):
            section["path"] = _folder(
                f"{place}.path",
                path,
                _value_at(earlier, "path"),
                whole,
                apart,
            )
    for place in ("environments", "evaluations") if whole else ():
        sections = table.get(place)
        for section in sections if isinstance(sections, list) else ():
            if isinstance(section, dict) and section.get("reference") == QUESTIONS:
                _pin_data(section.get("args"), before.get(place))


def _teacher_places(table: Mapping[str, Any]) -> list[str]:
    teachers = _value_at(table, "reference.teachers")
    if not isinstance(teachers, dict):
        return []
    return [teacher_setting(name) for name in teachers]


def _value_at(table: object, place: str) -> object:
    """Returns what stands at a dotted place of a table; None where nothing does."""
    inner = table
    for name in place.split("."):
        if not isinstance(inner, Mapping):
            return None
        inner = inner.get(name)
    return inner


def _folder(
    setting: str,
    path: str,
    before: object,
    whole: bool,
    apart: bool,
) -> str:
    """Returns `path` or, if it is a hub name, the folder into which the model is downloaded."""
    hub_name = _NAME.fullmatch(path)
    if hub_name is None or _is_local(Path(path)):
        return path
    name, revision = hub_name.groups()
    if apart and COMMIT.fullmatch(revision or "") is None:
        raise ConfigError(
            f"{setting} must name a commit, {name}@COMMIT, or a folder where the parts of a run "
            "are started one by one: each would take the newest state of its own time"
        )
    files = HubFiles(name, "model", revision, f"{setting}: {name}, no folder in {Path.cwd()},")
    earlier_folder = Path(before) if isinstance(before, str) else None
    if revision is None and earlier_folder is not None and files.holds(earlier_folder):
        files = HubFiles(name, "model", earlier_folder.name, files.shown)
    patterns = (*_SMALL, _WEIGHTS) if whole else _SMALL
    return str(files.bring(patterns, without=_WITHOUT))


def _is_local(path: Path) -> bool:
    """Whether a path is of a folder here, or will be one in models/."""
    owner = Path(path.parts[0])
    return path.exists() or owner.exists() or owner == Path("models")


def _pin_data(args: object, before: object) -> None:
    """Adds the commit of the data set that `args["path"]` names, as `args["hub_revision"]`."""
    if not isinstance(args, dict) or args.get("hub_revision") is not None:
        return
    path = args.get("path")
    if not isinstance(path, str) or not path.startswith(DATA_PREFIX):
        return
    earlier_sections = before if isinstance(before, list) else []
    for section in earlier_sections:
        revision = _value_at(section, "args.hub_revision")
        if revision and _value_at(section, "args.path") == path:
            args["hub_revision"] = revision
            return
    files = HubFiles(path.removeprefix(DATA_PREFIX), "dataset", shown=path)
    args["hub_revision"] = files.bring(["README.md"]).name
