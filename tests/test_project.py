"""What surrounds the code: workflows name what exists, and versions are said alike everywhere."""

import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from check_release import notes_of
from support.rigs.run_alone import alone

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGET = re.compile(r"^([a-z][\w-]*):", re.MULTILINE)
for_all_workflows = pytest.mark.parametrize(
    "path", WORKFLOWS, ids=lambda path: path.stem
)


def shell_steps(path: Path) -> Iterator[str]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from (step["run"] for step in job["steps"] if "run" in step)


def made(text: str) -> set[str]:
    """The targets of all `make` commands of a text."""
    words = [command.split() for command in re.findall(r"\bmake ([^\n`'|;&\]]+)", text)]
    return {
        word for some in words for word in some if re.fullmatch(r"[a-z][a-z-]*", word)
    }


@for_all_workflows
def test_every_target_that_a_workflow_makes_exists(path: Path) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    steps = "\n".join(shell_steps(path))
    assert made(steps) <= targets
    for program in re.findall(r"(?:^| )python (\S+\.py)", steps, re.MULTILINE):
        assert (ROOT / program).is_file(), program


def test_the_hooks_before_a_commit_make_what_exists() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0][
        "hooks"
    ]
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    entries = "\n".join(hook["entry"] for hook in hooks)
    assert {"protos-check", "type"} <= made(entries) <= targets


@for_all_workflows
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 350 for job in workflow["jobs"].values())


@for_all_workflows
def test_every_part_of_the_tests_has_a_runner(path: Path) -> None:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        parts = job.get("strategy", {}).get("matrix", {}).get("part", [])
        assert parts == [
            f"{number}/{len(parts)}" for number in range(1, len(parts) + 1)
        ]


def test_the_versions_of_python_are_those_of_the_workflows() -> None:
    (checks,) = (
        yaml.safe_load(path.read_text()) for path in WORKFLOWS if path.stem == "checks"
    )
    pythons = checks["jobs"]["quick"]["strategy"]["matrix"]["python"]
    versions = [
        text.rpartition(" ")[2]
        for text in PROJECT["classifiers"]
        if "Python :: 3." in text
    ]
    assert versions == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]},<3.{int(pythons[-1][2:]) + 1}"


def test_a_release_has_a_section_of_the_changelog() -> None:
    address = PROJECT["urls"]["Repository"]
    assert notes_of(f"v{PROJECT['version']}", address).startswith("First release.")


@pytest.mark.parametrize(
    ("tag", "address", "old", "new", "said"),
    [
        (
            "v9.9.9",
            "",
            "",
            "",
            r"the tag must be v0\.\d\.\d, as in pyproject.toml, got v9.9.9",
        ),
        ("", "https://a/b", "", "", "must begin with https://a/b, got https"),
        (
            "",
            "",
            "CITATION.cff: \nversion: ",
            "\nversion: 9",
            "CITATION.cff must have the line",
        ),
        ("", "", "CHANGELOG.md: ## ", "### ", "CHANGELOG.md must have a section"),
    ],
    ids=["tag", "address", "citation", "changelog"],
)
def test_a_tag_that_does_not_fit_is_not_released(
    tmp_path, tag, address, old, new, said
):
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    if old:
        name, _, text = old.partition(": ")
        path = tmp_path / name
        path.write_text(path.read_text().replace(text, new, 1))
    with pytest.raises(ValueError, match=said):
        notes_of(
            tag or f"v{PROJECT['version']}",
            address or PROJECT["urls"]["Repository"],
            tmp_path,
        )


def test_only_one_file_names_the_address_of_the_repository() -> None:
    address = PROJECT["urls"]["Repository"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "CITATION.cff"]
    assert [page for page in pages if address in page.read_text()] == []


def test_a_red_test_says_how_it_runs_alone_in_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUZZ", "0.2")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    nodeid = "tests/test_x.py::test_it[a 'quoted' $HOME]"
    assert shlex.split(alone(nodeid)) == [
        "FUZZ=0.2",
        sys.executable,
        "-m",
        "pytest",
        nodeid,
    ]
