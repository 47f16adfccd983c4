import ast
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.core.machine.other_python import NEEDS, worker_program
from support.rigs.completed import completed
from support.rigs.other_pythons import bare_python, furnished_python
from support.rigs.waiting import LIMIT_S

FAKES = str(Path(__file__).parents[3] / "support" / "fakes")
READY = "environment fake_workers:Good is ready: 3 tasks, 3 of them played\n"

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with no package."""
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of one that has this one's packages, but not Slipstream's own folders."""
    return furnished_python(tmp_path_factory.mktemp("furnished") / "venv")


def check(
    python: Path, reference: str, *options: object
) -> subprocess.CompletedProcess[str]:
    command = [
        *worker_program(str(python)),
        "--check",
        reference,
        "--search-path",
        FAKES,
    ]
    return completed([*command, *map(str, options)], timeout=LIMIT_S)


def test_a_worker_runs_with_another_interpreter_that_lacks_slipstream(
    furnished: Path,
) -> None:
    # -E: whoever runs the tests may have a PYTHONPATH with our sources.
    command = [furnished, "-E", "-c", "import slipstream"]
    lacks = subprocess.run(command, capture_output=True, check=False)
    assert lacks.returncode != 0
    ended = check(furnished, "fake_workers:Good")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(READY)


def test_a_check_goes_on_with_another_interpreter(
    furnished: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "slipstream.client.cli",
        "check",
        "fake_workers:Good",
    ]

    def ended(python: Path) -> tuple[int, str]:
        command_of_worker = [*command, "--python", str(python)]
        done = completed(command_of_worker, timeout=LIMIT_S, cwd=FAKES)
        return done.returncode, done.stdout + done.stderr

    code, errors = ended(furnished)
    assert code == 0
    assert "fake_workers:Good: 3 tasks, 3 of them played" in errors
    missing = tmp_path / "python"
    cause = (
        f"environment fake_workers:Good: python must be the path of an "
        f"interpreter, got {missing}"
    )
    assert ended(missing) == (2, f"slipstream: {cause}: {missing} cannot be run\n")


def test_the_worker_sees_the_variables_of_its_own_virtual_environment(
    furnished, tmp_path
):
    (tmp_path / "telling.py").write_text(
        "import os, sys\n"
        "raise ValueError(os.environ['VIRTUAL_ENV'] + ' ' + os.environ['PATH'].split(':')[0])\n"
    )
    command = [*worker_program(str(furnished)), "--check", "telling:X"]
    ended = completed([*command, "--search-path", str(tmp_path)], timeout=LIMIT_S)
    prefix = str(furnished.parents[1])
    assert f"ValueError: {prefix} {prefix}/bin (telling.py:2" in ended.stderr


def test_an_interpreter_that_lacks_packages_is_one_line_with_the_command(
    bare: Path,
) -> None:
    ended = check(bare, "fake_workers:Good")
    assert ended.returncode == 2
    assert ended.stdout == ""
    expected = " ".join(f"'{requirement}'" for requirement in NEEDS.values())
    assert (
        ended.stderr
        == f"{bare} lacks what a worker needs: {bare} -m pip install {expected}\n"
    )


@pytest.mark.parametrize(
    ("version", "is_right"),
    [
        ("1.75.9", False),
        ("1.76.0", True),
        ("1.85.1rc1", True),
        ("2.0", False),
        ("2.0rc1", False),
    ],
)
def test_another_version_of_a_package_is_refused(bare, tmp_path, version, is_right):
    folder = tmp_path / "venv"
    python = bare_python(folder)
    (site,) = folder.glob("lib/*/site-packages")
    for module, requirement in NEEDS.items():
        name, _, bounds = requirement.partition(">=")
        path = site.joinpath(*module.split("."))
        path.mkdir(parents=True)
        (path / "__init__.py").touch()
        info = site / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        version_text = version if name == "grpcio" else bounds.partition(",")[0]
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version_text}\n"
        )
    ended = check(python, "fake_workers:Good")
    message = "-m pip install 'grpcio>=1.76,<2'\n"
    assert ended.stderr.endswith(message) is not is_right, ended.stderr


def test_what_a_worker_needs_is_what_the_client_is_installed_with() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    assert set(NEEDS.values()) <= set(project["project"]["dependencies"])


def test_this_interpreter_runs_the_worker_as_a_module() -> None:
    assert worker_program("") == (sys.executable, "-m", "slipstream.client.worker")


def test_an_interpreter_from_before_its_types_reaches_the_refusal() -> None:
    source = Path(worker_program("python")[1]).read_text()
    tree = ast.parse(source, feature_version=(3, 7))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    types = [function.returns for function in functions]
    types += [
        argument.annotation for function in functions for argument in function.args.args
    ]
    assert "main" in [function.name for function in functions]
    # `tuple[int]` and `int | str` are evaluated where a function is defined.
    assert [
        annotation
        for annotation in types
        if not isinstance(annotation, ast.Name | ast.Constant)
    ] == []
