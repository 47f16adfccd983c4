"""The kernel's unit tests and a whole run work without each optional capability."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.rigs.run_processes import ROOT, checked
from support.rigs.smallest_run import SHORT, SMALLEST, own_settings

pytestmark = pytest.mark.usefixtures("nothing_survives")
STEPS = 20
# A `sitecustomize`, which Python imports at its start: a removed module has no entry point, and
# whoever imports it fails.
HOOK = """
import importlib.abc
import importlib.metadata
import sys

REMOVED = {removed!r}


def is_removed(name):
    return any(name == module or name.startswith(module + ".") for module in REMOVED)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if is_removed(name):
            raise ModuleNotFoundError(f"{{name}} is removed", name=name)
        return None


all_entry_points = importlib.metadata.entry_points


def entry_points(**chosen):
    entries = all_entry_points(**chosen)
    if chosen.get("group") != "slipstream.extensions":
        return entries
    return importlib.metadata.EntryPoints(e for e in entries if not is_removed(e.module))


importlib.metadata.entry_points = entry_points
sys.meta_path.insert(0, Finder())
"""
# Tests of modules of the kernel.
OF_KERNEL = (
    *(f"learner/controller/{name}" for name in ("leasing", "publishing", "records")),
    "learner/controller/trajectories",
    "learner/controller/services",
    "learner/trainer/algorithms",
    "learner/trainer/test_train.py",
    "rollout_server/episodes",
    "rollout_server/test_weight_orders.py",
)


def capabilities() -> dict[str, tuple[list[str], list[str]]]:
    """The modules of each optional capability, and the settings of a run that does without it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text[
        text.index("\n## What a run may do without") : text.index("\n## Words")
    ]
    rows = re.findall(
        r"^\| ([^|`]+) \| (`slipstream[^|]+) \| ([^|]+) \|", section, re.MULTILINE
    )
    return {
        name: (
            re.findall(r"`([^`]+)`", modules),
            re.findall(r"`(\w+\.[^`]+=[^`]+)`", settings),
        )
        for name, modules, settings in rows
    }


def sources(module: str) -> list[Path]:
    """The files of a module or package."""
    place = module.replace(".", "/")
    files = [
        file
        for root in ROOT.glob("*/slipstream")
        for file in [root.parent / f"{place}.py"]
    ]
    folders = [root.parent / place for root in ROOT.glob("*/slipstream")]
    within = [file for folder in folders for file in folder.rglob("*.py")]
    return [*filter(Path.is_file, files), *within]


def run(*words: object, hook: Path, cwd: Path, limit_s: float) -> None:
    """Runs a program without the removed modules; its exit code must be 0."""
    path = os.pathsep.join([str(hook), os.getenv("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-20_000:]


def train(folder: Path, model: Path, removed: list[str], settings: list[str]) -> None:
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(removed=(*removed,)))
    arguments = (*own_settings(folder, model), *SHORT, f"run.steps={STEPS}", *settings)
    command = ("-m", "slipstream.client.cli", "run", SMALLEST, *arguments)
    run(*command, hook=hook, cwd=folder, limit_s=500)
    summary = checked(folder / "smallest")
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)


def test_every_extension_has_a_row_and_every_row_its_modules() -> None:
    modules_of_all = [
        module for modules, _ in capabilities().values() for module in modules
    ]
    assert all(map(sources, modules_of_all))
    modules = (ROOT / "extensions" / "slipstream" / "extensions").glob("*/*.py")
    extensions = {f"slipstream.extensions.{file.parent.name}" for file in modules}
    assert len(extensions) >= 14
    assert extensions == {
        name for name in modules_of_all if name.startswith("slipstream.extensions.")
    }


@pytest.mark.long
def test_a_run_trains_without_any_of_them(tmp_path: Path, tiny_model: Path) -> None:
    pairs = capabilities().values()
    modules = [module for own_modules, _ in pairs for module in own_modules]
    settings = [
        setting
        for _, own_settings_of_extension in pairs
        for setting in own_settings_of_extension
    ]
    train(tmp_path, tiny_model, modules, settings)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(capabilities()))
def test_the_kernel_works_without(name: str, tmp_path: Path, tiny_model: Path) -> None:
    modules, settings = capabilities()[name]
    train(tmp_path, tiny_model, modules, settings)
    tests = [ROOT / "tests" / "unit" / place for place in OF_KERNEL]
    files = [file for place in tests for file in [*place.rglob("test_*.py")] or [place]]
    names = re.compile("|".join(re.escape(module) for module in modules))
    # Tests of the capability itself.
    ignored_files = [
        f"--ignore={file}" for file in files if names.search(file.read_text())
    ]
    command = (
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *tests,
        *ignored_files,
    )
    run(*command, hook=tmp_path / "hook", cwd=ROOT, limit_s=600)
