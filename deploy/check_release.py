"""Prints the notes of a release, or says in one line why its tag must not be released.

python deploy/check_release.py v0.1.0 https://github.com/OWNER/slipstream
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes_of(tag: str, address: str, root: Path = ROOT) -> str:
    """Returns the part of CHANGELOG.md about `tag`; raises ValueError if the tag does not fit."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    if tag != f"v{project['version']}":
        raise ValueError(f"the tag must be v{project['version']}, as in pyproject.toml, got {tag}")
    for url in project["urls"].values():
        if not f"{url}/".startswith(f"{address}/"):
            raise ValueError(f"project.urls in pyproject.toml must begin with {address}, got {url}")
    cited = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1] != project["version"]:
        raise ValueError(f"CITATION.cff must have the line `version: {project['version']}`")
    changes = (root / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## {re.escape(project['version'])}\n(.*?)(?=^## |\Z)", changes, re.DOTALL | re.MULTILINE
    )
    if section is None:
        raise ValueError(f"CHANGELOG.md must have a section `## {project['version']}`")
    return section[1].strip()


if __name__ == "__main__":
    try:
        tag, address = sys.argv[1:]
        print(notes_of(tag, address))
    except ValueError as error:
        sys.exit(f"slipstream: {error}")
