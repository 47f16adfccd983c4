"""Puts the newest results into the pages beside them, benchmarks/results/*.md.

A block between `<!-- results NAME -->` and the next `<!-- end -->` gets the contents of
benchmarks/results/NAME.json: its command, date, machine, versions and table. docs/performance.md
has the short form and is written by hand; a test compares its figures.

    python -m benchmarks.common.report
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common.measure import RESULTS

BLOCK = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_YET = "Not measured yet."


def render(name: str, folder: Path) -> str:
    """Returns the text between the two lines of a block; it ends with a line break."""
    path = folder / f"{name}.json"
    if not path.exists():
        return f"{NOT_YET}\n"
    result = json.loads(path.read_text())
    lines = result["table"]
    blocks = [
        list(block) for is_row, block in groupby(lines, lambda line: line[:1] == "|") if is_row
    ]
    # A part that was not measured has only its titles.
    tables = ["\n".join(block) for block in blocks if len(block) > 2]
    notes = [line for line in lines if line and not line.startswith("|")]
    # The command of a program that is no longer here says in which commit it is.
    fence, commit = ("```text", result["commit"]) if "commit" in result else ("```", None)
    parts = [facts(result), f"{fence}\n{result['command']}\n```", *tables, *notes]
    if result.get("stages"):
        parts.append("\n".join(result["stages"]))
    if commit:
        parts.append(f"The program is in the history of this repository: commit {commit}.")
    return "\n" + "\n\n".join(parts) + "\n"


def facts(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = machine
    if isinstance(machine, dict):
        gpus = [gpu.split(",")[0].removeprefix("NVIDIA ") for gpu in machine.get("gpus", [])]
        where = f"{machine.get('cores')} cores of {machine.get('processor')}"
        if gpus:
            where = f"{len(gpus)} x {gpus[0]}, {where}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}; {where}; {versions}."


def fill(page: str, folder: Path) -> str:
    """Returns the page with all blocks filled from the results in `folder`."""
    return BLOCK.sub(lambda m: m.group(1) + render(m.group(2), folder) + m.group(3), page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    for page in sorted(arguments.results.glob("*.md")):
        page.write_text(fill(page.read_text(), arguments.results))


if __name__ == "__main__":
    main()
