"""Models and data sets by their names on the hub: every part of a run takes the same state of one.

A name becomes the folder of a commit in the hub's cache. The run's folder keeps it, and a run that
goes on or is replayed takes it from there, whatever the hub has become.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.hub import COMMIT, DATA_PREFIX, HubFiles

MODELS = ("model", "reference", "critic")
QUESTIONS = "slipstream.environments.questions:Questions"
# OWNER/NAME, and maybe a commit, tag or branch of it.
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w./-]+))?")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = "*.safetensors"
# Other forms of the same weights, and what belongs to them.
_WITHOUT = ("consolidated*", "original/*", "*/*.safetensors", "params.json")


def bring_files(
    table: dict[str, Any], before: Mapping[str, Any], *, whole: bool, apart: bool
) -> None:
    """Replaces names on the hub in `table` by folders and commits.

    `before` are the settings in the run's folder, if there are any. Without `whole` models come
    without weights, and data sets stay. With `apart` other parts of the run start elsewhere, so
    that a model's name must have a commit. Raises ConfigError if something is not to be had.
    """
    for place in MODELS:
        section, earlier = table.get(place), before.get(place)
        if isinstance(section, dict) and isinstance(section.get("path"), str):
            known = earlier.get("path") if isinstance(earlier, dict) else None
            section["path"] = _folder(f"{place}.path", section["path"], known, whole, apart)
    for place in ("environments", "evaluations") if whole else ():
        sections = table.get(place)
        for section in sections if isinstance(sections, list) else ():
            if isinstance(section, dict) and section.get("reference") == QUESTIONS:
                _pin_data(section.get("args"), before.get(place))


def _folder(setting: str, path: str, before: object, whole: bool, apart: bool) -> str:
    """Returns the folder of a name on the hub, and any other path as it is."""
    named = _NAME.fullmatch(path)
    owner = path.partition("/")[0]
    # A folder in models/ that is missing was to be made or brought by hand.
    if named is None or Path(path).exists() or owner == "models" or Path(owner).exists():
        return path
    name, revision = named.groups()
    if apart and COMMIT.fullmatch(revision or "") is None:
        raise ConfigError(
            f"{setting} must name a commit, {name}@COMMIT, or a folder where the parts of a run "
            "are started one by one: each would take the newest state of its own time"
        )
    files = HubFiles(name, "model", revision, f"{setting}: {name}, no folder in {Path.cwd()},")
    if revision is None and isinstance(before, str) and files.holds(Path(before)):
        files = HubFiles(name, "model", Path(before).name, files.shown)
    patterns = (*_SMALL, _WEIGHTS) if whole else _SMALL
    return str(files.bring(patterns, without=_WITHOUT))


def _pin_data(args: object, before: object) -> None:
    """Adds the commit of a data set to the arguments that name it."""
    if not isinstance(args, dict) or args.get("hub_revision") is not None:
        return
    path = args.get("path")
    if not isinstance(path, str) or not path.startswith(DATA_PREFIX):
        return
    for section in before if isinstance(before, list) else ():
        known = section.get("args", {}) if isinstance(section, dict) else {}
        if known.get("path") == path and known.get("hub_revision"):
            args["hub_revision"] = known["hub_revision"]
            return
    files = HubFiles(path.removeprefix(DATA_PREFIX), "dataset", shown=path)
    args["hub_revision"] = files.bring(["README.md"]).name
