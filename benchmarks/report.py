"""Puts the newest results into docs/performance.md.

Between a line `<!-- results NAME -->` and the next `<!-- end -->` comes what
benchmarks/results/NAME.json holds: its command, date, machine, versions and table.

    python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from measure import RESULTS

PAGE = RESULTS.parents[1] / "docs" / "performance.md"
BLOCK = re.compile(r"(<!-- results (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_YET = "Not measured yet."


def render(name: str, folder: Path) -> str:
    """Returns the text between the two lines of a block; it ends with a line break."""
    path = folder / f"{name}.json"
    if not path.exists():
        return f"{NOT_YET}\n"
    result = json.loads(path.read_text())
    table = [line for line in result["table"] if line.startswith("|")]
    notes = [line for line in result["table"] if line and not line.startswith("|")]
    parts = [facts(result), f"```\n{result['command']}\n```", "\n".join(table), *notes]
    if result.get("stages"):
        parts.append("\n".join(result["stages"]))
    return "\n" + "\n\n".join(parts) + "\n"


def facts(result: dict[str, Any]) -> str:
    """Returns one line with date, machine and versions."""
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
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.page.write_text(fill(arguments.page.read_text(), arguments.results))


if __name__ == "__main__":
    main()
