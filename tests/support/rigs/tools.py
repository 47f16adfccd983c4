"""Programs and packages of others, where `make test-tools` or a developer has put them."""

import os
import shutil
import sys
from pathlib import Path

import pytest

INSTALLED = Path(sys.prefix) / "tools"
HOW = "make test-tools has it"


def folder(name: str) -> Path:
    """The folder of a tool: where SLIPSTREAM_NAME says, or where `make test-tools` puts it."""
    return Path(
        os.environ.get(f"SLIPSTREAM_{name.upper()}", INSTALLED / name)
    ).absolute()


def add_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import packages of a tool which the tests' own environment lacks."""
    packages = map(str, folder(name).glob("lib/python*/site-packages"))
    monkeypatch.setattr(sys, "path", [*sys.path, *packages])


def program(name: str) -> str | None:
    """The path of a program of this machine, or of one that `make test-tools` has unpacked."""
    return shutil.which(name) or shutil.which(
        name, path=str(folder("programs") / "bin")
    )
