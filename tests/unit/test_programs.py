"""Every program of the project can be imported: its annotations and names are looked up then."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(ROOT.glob("*/slipstream/**/__main__.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.parent.name)
def test_a_program_can_be_imported(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
    assert importlib.import_module(module).main
